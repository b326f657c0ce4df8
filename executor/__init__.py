"""The same scenario, for real, on Ray, vLLM and DeepSpeed."""
