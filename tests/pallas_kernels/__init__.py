"""Tests of the kernels: against their references, and compiled for the devices they are for."""
