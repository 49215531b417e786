package sys

import (
	"bytes"
	"os"
	"strconv"
	"strings"
)

// The files of cgroup v2 and v1, in this order; the sandbox sees its own cgroup at the top of the mount.
const cgroupRoot = "/sys/fs/cgroup/"

func readNumber(names ...string) *int64 {
	for _, name := range names {
		data, err := os.ReadFile(cgroupRoot + name)
		if err != nil {
			continue
		}
		n, err := strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
		// v1 says "no limit" as a number near 2^63, v2 as "max".
		if err == nil && n < 1<<60 {
			return &n
		}
	}
	return nil
}

func readKey(key string, names ...string) *int64 {
	for _, name := range names {
		data, err := os.ReadFile(cgroupRoot + name)
		if err != nil {
			continue
		}
		for _, line := range bytes.Split(data, []byte{'\n'}) {
			k, v, ok := bytes.Cut(line, []byte{' '})
			if ok && string(k) == key {
				if n, err := strconv.ParseInt(string(v), 10, 64); err == nil {
					return &n
				}
			}
		}
	}
	return nil
}

// MemoryLimit is the sandbox's memory limit in bytes, nil when there is none or it cannot be read.
func MemoryLimit() *int64 { return readNumber("memory.max", "memory/memory.limit_in_bytes") }

// MemoryCurrent is the memory in use in bytes.
func MemoryCurrent() *int64 { return readNumber("memory.current", "memory/memory.usage_in_bytes") }

// OOMKills counts the processes that the kernel killed for want of memory.
func OOMKills() *int64 {
	return readKey("oom_kill", "memory.events", "memory/memory.oom_control")
}

// PidsLimit is the sandbox's limit of processes and threads.
func PidsLimit() *int64 { return readNumber("pids.max", "pids/pids.max") }

// PidsCurrent counts processes and threads.
func PidsCurrent() *int64 { return readNumber("pids.current", "pids/pids.current") }

// CPUNanoseconds is the CPU time used so far.
func CPUNanoseconds() *int64 {
	if us := readKey("usage_usec", "cpu.stat"); us != nil {
		ns := *us * 1000
		return &ns
	}
	return readNumber("cpuacct/cpuacct.usage", "cpu,cpuacct/cpuacct.usage")
}
