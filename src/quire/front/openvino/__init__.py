"""OpenVINO GenAI's continuous-batching API for the engine."""
