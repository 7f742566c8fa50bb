"""What runs on each rank for test_behaviour.py: functions of (rank, world, ...) that raise where something is wrong."""
