from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.timeline import Header, Lane, Span, Timeline, read_parquet, write_parquet

numbers = st.floats(-1e6, 1e6)
spans = st.builds(
    Span,
    span_id=st.text(max_size=8), cause_ids=st.lists(st.text(max_size=5), max_size=3).map(tuple), resource=st.text(max_size=5),
    step=st.integers(-1, 1000), stage=st.sampled_from(["rollout", "reward"]), op=st.sampled_from(["", "decode"]),
    pool=st.text(max_size=3), worker=st.text(max_size=3), start_s=numbers, end_s=numbers, policy_version=st.integers(0, 99),
    tokens=st.integers(0, 2**40), bytes=st.floats(0, 1e15),
    attrs=st.dictionaries(st.text(max_size=4), st.integers(-(2**40), 2**40) | st.text(max_size=4) | st.booleans(), max_size=3),
)  # fmt: skip
HEADER = Header(
    scenario="s",
    digest="d",
    origin="simulated",
    seed=1,
    num_steps=2,
    pools={"p": ("n[0]",)},
    lanes={"w": Lane(pool="p", devices=("n[0]",))},
)


@given(st.lists(spans, max_size=5))
def test_parquet_gives_back_what_was_written(tmp_path_factory: pytest.TempPathFactory, found: list[Span]) -> None:
    path = tmp_path_factory.mktemp("t") / "spans.parquet"
    timeline = Timeline.of(HEADER, found)
    write_parquet(timeline, path)
    again = read_parquet(path)
    assert again == timeline and again.digest() == timeline.digest()


def test_the_digest_is_of_the_work_and_not_of_the_host() -> None:
    one = Span(span_id="a", resource="w", step=0, stage="rollout", pool="p", worker="w", start_s=0, end_s=1)
    timeline = Timeline.of(HEADER, [one])
    elsewhere = msgspec.structs.replace(HEADER, wall_s=9.0, host={"name": "x"}, software={"python": "3"}, startup_s=3.0)
    assert Timeline.of(elsewhere, [one]).digest() == timeline.digest()
    later = msgspec.structs.replace(one, end_s=1.0000001)
    assert Timeline.of(HEADER, [later]).digest() != timeline.digest()
    assert Timeline.of(msgspec.structs.replace(HEADER, seed=2), [one]).digest() != timeline.digest()


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not parquet at all"])
def test_a_file_that_is_no_timeline_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a timeline"):
        read_parquet(path)
