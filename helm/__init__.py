"""The Helm chart, and the code that makes the parts of it that follow from other code."""
