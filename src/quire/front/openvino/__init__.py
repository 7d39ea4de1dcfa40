"""The engine under the names that OpenVINO GenAI users know."""
