"""The rungs below Hopper's designs, one file each: what each step of a fast product brings. See docs/ladder.md."""
