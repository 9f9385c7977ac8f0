"""Measures a config: its speed, its memory, and its numbers against fp32."""
