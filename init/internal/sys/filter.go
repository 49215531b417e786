package sys

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The signals that a Go program takes for a fault of its own, whoever sent them: no signal.Notify keeps them from its runtime. When they come from
// rt_sigqueueinfo(2) with another si_code than kill(2) has, the runtime ends the program.
var faults = []unix.Signal{
	unix.SIGILL, unix.SIGTRAP, unix.SIGBUS, unix.SIGFPE, unix.SIGSEGV, unix.SIGSTKFLT, unix.SIGSYS,
}

// action is the kernel's struct sigaction of amd64 and arm64.
type action struct {
	handler  uintptr
	flags    uint64
	restorer uintptr
	mask     uint64
}

// next is the handler of the Go runtime, which the filter calls for real faults. It is the same for all signals.
var next uintptr

// filterPC is the address of the filter, in filter_*.s.
func filterPC() uintptr

// DropSentFaults makes fault signals that were sent by a process do nothing; real faults reach the runtime as before. Call it once, early.
func DropSentFaults() error {
	for _, signal := range faults {
		var now action
		if err := sigaction(signal, nil, &now); err != nil {
			return fmt.Errorf("the action of %v cannot be read: %w", signal, err)
		}
		if now.handler <= 1 || next != 0 && now.handler != next {
			continue // not the runtime's
		}
		next = now.handler
		now.handler = filterPC()
		if err := sigaction(signal, &now, nil); err != nil {
			return fmt.Errorf("the action of %v cannot be set: %w", signal, err)
		}
	}
	return nil
}

func sigaction(signal unix.Signal, set, old *action) error {
	_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(signal), uintptr(unsafe.Pointer(set)), uintptr(unsafe.Pointer(old)), unsafe.Sizeof(old.mask), 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}
