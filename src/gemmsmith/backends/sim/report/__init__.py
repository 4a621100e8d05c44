"""What the simulator reports: hazards, the record of all events, the timeline, and the durations of both."""
