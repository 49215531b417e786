// Package sys reads what the kernel says about processes and limits, and keeps sent signals from PID 1. It forks nothing, holds at most two files
// open at a time, and needs little memory however many processes there are.
package sys

import (
	"bytes"
	"errors"
	"io"
	"os"
	"sort"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Proc is one process as /proc shows it.
type Proc struct {
	PID     int
	PPID    int
	Group   int
	Session int
	State   byte
	Start   uint64 // clock ticks after boot: with PID the identity of a process
	Name    string // at most 15 bytes, chosen by the process itself
}

// Dead says that it only waits to be reaped, or is gone.
func (p Proc) Dead() bool { return p.State == 'Z' || p.State == 'X' || p.State == 'x' }

// Stopped says that it is stopped by a signal or by a tracer.
func (p Proc) Stopped() bool { return p.State == 'T' || p.State == 't' }

// Outside says that the engine started it in this sandbox. A child of sandboxed code never has parent 0: an orphan's parent is PID 1.
func (p Proc) Outside() bool { return p.PPID == 0 && p.PID != 1 }

// Bridge says that it is `sandbox-init connect`. Sandboxed code can take any name, but no parent 0.
func (p Proc) Bridge(ownName string) bool { return p.Outside() && p.Name == ownName }

const (
	ticks       = time.Second / 100 // USER_HZ is 100 on every Linux that this runs on
	statSize    = 1024
	environPart = 4 << 10
)

// Read reads /proc/PID/stat; ok is false when the process is gone.
func Read(pid int) (p Proc, ok bool) {
	var buffer [statSize]byte
	data, ok := readInto("/proc/"+strconv.Itoa(pid)+"/stat", buffer[:])
	if !ok {
		return p, false
	}
	return parseStat(data)
}

func readInto(path string, buffer []byte) ([]byte, bool) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, false
	}
	defer func() { _ = unix.Close(fd) }()
	n, err := unix.Read(fd, buffer)
	for errors.Is(err, unix.EINTR) {
		n, err = unix.Read(fd, buffer)
	}
	if err != nil {
		return nil, false
	}
	return buffer[:n], true
}

func parseStat(data []byte) (p Proc, ok bool) {
	// The name is in parentheses and may hold anything, also parentheses and spaces.
	open, end := bytes.IndexByte(data, '('), bytes.LastIndexByte(data, ')')
	if open < 1 || end < open {
		return p, false
	}
	pid, err := strconv.Atoi(string(bytes.TrimSpace(data[:open])))
	fields := bytes.Fields(data[end+1:])
	if err != nil || len(fields) < 20 || len(fields[0]) != 1 {
		return p, false
	}
	p.PID, p.Name, p.State = pid, string(data[open+1:end]), fields[0][0]
	p.PPID, _ = strconv.Atoi(string(fields[1]))
	p.Group, _ = strconv.Atoi(string(fields[2]))
	p.Session, _ = strconv.Atoi(string(fields[3]))
	p.Start, err = strconv.ParseUint(string(fields[19]), 10, 64)
	return p, err == nil
}

// Scan lists the processes of this pid namespace by PID, without PID 1. It lists /proc again until no new one is there: a process that is born
// between the listing and the look at its parent, which is dead or stopped by then, would be in neither.
func Scan() ([]Proc, error) {
	const rounds = 4 // more only where new ones come faster than they are listed, and the caller has to look again anyway
	seen := map[int]bool{1: true}
	var found []Proc
	for range rounds {
		names, err := listProc()
		if err != nil {
			return nil, err
		}
		fresh := false
		for _, name := range names {
			pid, err := strconv.Atoi(name)
			if err != nil || seen[pid] {
				continue
			}
			seen[pid], fresh = true, true
			if p, ok := Read(pid); ok {
				found = append(found, p)
			}
		}
		if !fresh {
			break
		}
	}
	sort.Slice(found, func(i, j int) bool { return found[i].PID < found[j].PID })
	return found, nil
}

func listProc() ([]string, error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer func() { _ = dir.Close() }()
	return dir.Readdirnames(-1)
}

// Mark is what a look into the environment of a process has shown.
type Mark int

// The results of FindEnv.
const (
	Unreadable Mark = iota // the process hides its environment, or is gone
	Absent                 // the variable is not there
	Other                  // the variable has another value
	Same
)

// FindEnv looks for name=value in the environment that a process was started with. It reads in parts: an environment may have megabytes.
func FindEnv(pid int, name, value string) Mark {
	fd, err := unix.Open("/proc/"+strconv.Itoa(pid)+"/environ", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return Unreadable
	}
	file := os.NewFile(uintptr(fd), "environ")
	defer func() { _ = file.Close() }()
	return findEnv(file, name, value)
}

func findEnv(r io.Reader, name, value string) Mark {
	prefix := []byte(name + "=")
	found := Absent
	buffer := make([]byte, environPart)
	kept, inside := 0, false // inside: an entry that was longer than the buffer goes on
	for {
		n, err := r.Read(buffer[kept:])
		if n == 0 && err != io.EOF && kept == 0 && found == Absent {
			return Unreadable
		}
		rest := buffer[:kept+n]
		for {
			entry, after, whole := bytes.Cut(rest, []byte{0})
			if !whole && err == nil && !(len(rest) == len(buffer)) {
				break
			}
			if tail, ok := bytes.CutPrefix(entry, prefix); ok && !inside {
				if string(tail) == value {
					return Same
				}
				found = Other
			}
			inside = !whole
			rest = after
			if !whole {
				break
			}
		}
		if err != nil {
			return found
		}
		kept = copy(buffer, rest)
	}
}

// Uptime is the time since boot on the clock of Proc.Start.
func Uptime() (uint64, bool) {
	var now unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) != nil {
		return 0, false
	}
	return uint64(time.Duration(now.Nano()) / ticks), true
}

// Age is how long a process has lived, by Uptime.
func (p Proc) Age(uptime uint64) time.Duration {
	if uptime < p.Start {
		return 0
	}
	return time.Duration(uptime-p.Start) * ticks
}
