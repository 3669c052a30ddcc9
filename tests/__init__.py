"""Tests of mt_lightning; the folders mirror the rooms of the package."""
