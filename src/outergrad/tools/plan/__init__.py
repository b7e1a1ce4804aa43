"""Prediction of bytes and step times of methods, before there are sites."""
