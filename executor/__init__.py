"""The same scenario, for real, on Ray, vLLM and DeepSpeed."""

import os

# Read by Ray when it is imported. It would tell of every process that dies on the standard output, where a summary is to
# stand; the run itself tells of those that matter. And it would keep a record of every call, which nobody asks for: the
# memory of a long run would grow. Of processes that have died, and of their workers, it need not know for ever either.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^A worker died or was killed while executing")
os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
os.environ.setdefault("RAY_maximum_gcs_destroyed_actor_cached_count", "256")
os.environ.setdefault("RAY_maximum_gcs_dead_worker_cached_count", "256")
