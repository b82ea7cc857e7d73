"""The `tmx` command: one short file per command, each calling one public function."""
