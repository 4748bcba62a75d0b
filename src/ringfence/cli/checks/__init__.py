"""The checks of `ringfence doctor`: software, hardware, accelerator, configuration, a group of one worker."""
