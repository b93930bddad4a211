"""The foundation of all packages: errors, devices, random numbers, knobs, optional packages."""
