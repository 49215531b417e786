package sys

import (
	"os"
	"strconv"
	"strings"
)

// Self is what init itself holds, as GET /v1/resources shows it; what cannot be read is nil.
func Self(goroutines int) map[string]any {
	out := map[string]any{"rss": nil, "threads": nil, "goroutines": goroutines, "open_files": nil}
	if data, err := os.ReadFile("/proc/self/status"); err == nil {
		for _, line := range strings.Split(string(data), "\n") {
			name, value, _ := strings.Cut(line, ":")
			value = strings.TrimSuffix(strings.TrimSpace(value), " kB")
			n, err := strconv.ParseInt(value, 10, 64)
			switch {
			case err != nil:
			case name == "VmRSS":
				out["rss"] = n << 10
			case name == "Threads":
				out["threads"] = n
			}
		}
	}
	if dir, err := os.Open("/proc/self/fd"); err == nil {
		names, err := dir.Readdirnames(-1)
		_ = dir.Close()
		if err == nil {
			out["open_files"] = len(names) - 1
		}
	}
	return out
}
