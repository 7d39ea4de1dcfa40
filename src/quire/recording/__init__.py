"""Records a scheduler's inputs, replays them exactly, and shows the recording."""
