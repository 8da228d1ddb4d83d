"""The commands, by what they are about; they load what they need when they are called."""
