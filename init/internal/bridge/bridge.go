// Package bridge copies stdin and stdout to the socket of PID 1: `sandbox-init connect`, run by the engine from outside.
package bridge

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const (
	comeUp     = 2 * time.Second
	retry      = 10 * time.Millisecond
	bufferSize = 64 << 10
)

// Run copies until either side ends and returns the exit code. One thread does it all, with poll: every thread of a bridge is taken from the
// process limit of the sandbox.
func Run(socket string, checkPeer bool) int {
	fd, err := dial(socket)
	if err != nil {
		fmt.Fprintf(os.Stderr, "sandbox-init connect: no answer at the socket of PID 1: %v\n", err)
		return 1
	}
	if checkPeer {
		cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err != nil || cred.Pid != 1 {
			fmt.Fprintln(os.Stderr, "sandbox-init connect: the socket does not belong to PID 1: refused")
			return 1
		}
	}
	for _, one := range []int{0, 1, fd} {
		if err := unix.SetNonblock(one, true); err != nil {
			fmt.Fprintf(os.Stderr, "sandbox-init connect: descriptor %d cannot be polled: %v\n", one, err)
			return 1
		}
	}
	// The end of stdin is passed on: what PID 1 still answers comes back. The end of the socket ends everything.
	in := &flow{from: 0, to: fd, atEnd: func() { _ = unix.Shutdown(fd, unix.SHUT_WR) }}
	out := &flow{from: fd, to: 1, atEnd: func() {}}
	for !out.done {
		if err := step(in, out); err != nil {
			fmt.Fprintf(os.Stderr, "sandbox-init connect: %v\n", err)
			return 1
		}
	}
	return 0
}

func dial(socket string) (int, error) {
	deadline := time.Now().Add(comeUp)
	for {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return -1, err
		}
		err = unix.Connect(fd, &unix.SockaddrUnix{Name: socket})
		if err == nil {
			return fd, nil
		}
		_ = unix.Close(fd)
		// PID 1 may be coming up.
		if !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, unix.EAGAIN) || time.Now().After(deadline) {
			return -1, err
		}
		time.Sleep(retry)
	}
}

// flow is one direction. It reads only when all that it read before is written, so a slow side holds up its own direction alone.
type flow struct {
	from, to int
	buffer   [bufferSize]byte
	rest     []byte // read and not yet written
	done     bool   // and everything written, or nobody to write to
	atEnd    func()
}

// wants is what the flow waits for.
func (f *flow) wants() (fd int32, events int16) {
	switch {
	case f.done:
		return -1, 0 // poll skips it
	case len(f.rest) > 0:
		return int32(f.to), unix.POLLOUT
	default:
		return int32(f.from), unix.POLLIN
	}
}

// move does what can be done without waiting.
func (f *flow) move() {
	for !f.done {
		if len(f.rest) == 0 {
			n, err := unix.Read(f.from, f.buffer[:])
			switch {
			case err == unix.EINTR:
				continue
			case err == unix.EAGAIN:
				return
			case err != nil || n == 0:
				f.done = true
				f.atEnd()
				return
			}
			f.rest = f.buffer[:n]
		}
		n, err := unix.Write(f.to, f.rest)
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			return
		case err != nil:
			f.done = true // the reader is gone: so is all reason to go on
		default:
			f.rest = f.rest[n:]
		}
	}
}

// step waits until either direction can go on, and lets it.
func step(flows ...*flow) error {
	var polled [2]unix.PollFd
	for i, f := range flows {
		polled[i].Fd, polled[i].Events = f.wants()
	}
	if _, err := unix.Poll(polled[:], -1); err != nil && err != unix.EINTR {
		return err
	}
	for i, f := range flows {
		if polled[i].Revents != 0 {
			f.move()
		}
	}
	return nil
}
