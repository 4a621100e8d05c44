"""What the simulator reports: hazards, the timeline, and the durations that it is drawn with."""
