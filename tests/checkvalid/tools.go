//go:build tools

// Keeps pprof itself, which the tests build and ask, in go.mod.
package main

import _ "github.com/google/pprof"
