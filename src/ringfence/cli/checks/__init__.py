"""The checks of `ringfence doctor`, by what they look at: software, hardware, configuration, a group of one worker."""
