package sys

import (
	"fmt"
	"os"
	"runtime/debug"
)

// Recover is deferred at the top of every goroutine of init's own: PID 1 outlives its faults, and says so in its log.
func Recover(what string) {
	if fault := recover(); fault != nil {
		fmt.Fprintf(os.Stderr, "sandbox-init: a fault in %s, which ends it: %v\n%s", what, fault, debug.Stack())
	}
}
