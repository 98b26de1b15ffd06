"""DeepSpeed as a backend: ZeRO and the pipeline engine."""
