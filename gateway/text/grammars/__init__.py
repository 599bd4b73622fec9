"""Grammars of the output: conversion from what clients send, and trial compilation."""
