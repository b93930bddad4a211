"""What everything stands on: errors, devices, random numbers, knobs, optional packages."""
