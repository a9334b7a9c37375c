"""One engine over several processes: the leader schedules, the followers run the same steps on their devices."""
