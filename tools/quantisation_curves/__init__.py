"""The accuracy and size of quantised models: all our methods, formats and targets, and other tools' outputs."""
