"""The two probes at run time: what is waited for at an acquire, and freed at a release."""
