package process

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"agentsandbox.dev/init/internal/apierr"
)

const (
	// ExecIDVariable marks everything that a command starts, so that it is found however it hides.
	ExecIDVariable = "SANDBOX_EXEC_ID"

	maxArgument  = 128<<10 - 1 // MAX_ARG_STRLEN less its NUL
	maxArguments = 2 << 20     // a quarter of the usual 8 MiB stack: what execve takes of arguments and environment together
	shell        = "/bin/sh"
)

var (
	idPattern  = regexp.MustCompile(`^[0-9a-f]{32}$`)
	envPattern = regexp.MustCompile(`^[^=\x00]+$`)
)

// Window is the size of a terminal in characters.
type Window struct {
	Rows uint16 `json:"rows"`
	Cols uint16 `json:"cols"`
}

// spec is the body of a start.
type spec struct {
	Command   *string           `json:"command"`
	Argv      []string          `json:"argv"`
	Env       map[string]string `json:"env"`
	Cwd       string            `json:"cwd"`
	TimeoutMS *int64            `json:"timeout_ms"`
	Lease     *string           `json:"lease"`
	LeaseTTL  int64             `json:"lease_ttl_ms"`
	Stdin     bool              `json:"stdin"`
	PTY       *Window           `json:"pty"`
	Forget    []string          `json:"forget,omitempty"`
}

// digest tells one body from another; what is only a courtesy of this request (forget) is left out.
func (s spec) digest() [sha256.Size]byte {
	s.Forget = nil
	b, _ := json.Marshal(s) // maps are in order of their keys
	return sha256.Sum256(b)
}

func (s *spec) check(workspace string) error {
	if (s.Command == nil) == (len(s.Argv) == 0) {
		return apierr.Invalid("give exactly one of command (a string for %s) and argv (a list that is not empty)", shell)
	}
	if s.Command != nil {
		if *s.Command == "" {
			return apierr.Invalid("the command is empty: give a command")
		}
		s.Argv = []string{shell, "-c", *s.Command}
	} else if s.Argv[0] == "" {
		return apierr.Invalid("the program's name is empty: give its name or path as the first argument")
	}
	total := 0
	for i, arg := range s.Argv {
		if strings.IndexByte(arg, 0) >= 0 {
			return apierr.Invalid("argument %d holds a NUL byte, which no argument can: write such data to a file", i)
		}
		if len(arg) > maxArgument {
			return apierr.Invalid("argument %d has %d bytes, the kernel takes at most %d: write it to a file and pass its path", i, len(arg), maxArgument)
		}
		total += len(arg) + 9
	}
	for name, value := range s.Env {
		if !envPattern.MatchString(name) {
			return apierr.Invalid("%q is no name of an environment variable: it must not be empty and hold neither '=' nor NUL", name)
		}
		if strings.IndexByte(value, 0) >= 0 {
			return apierr.Invalid("the value of the environment variable %s holds a NUL byte, which no value can", name)
		}
		if len(name)+len(value)+1 > maxArgument {
			return apierr.Invalid("the environment variable %s is over %d bytes: write it to a file and pass its path", name, maxArgument)
		}
		total += len(name) + len(value) + 10
	}
	if total > maxArguments {
		return tooLarge(total)
	}
	if s.TimeoutMS != nil && *s.TimeoutMS <= 0 {
		return apierr.Invalid("timeout_ms must be over 0")
	}
	if s.Lease != nil && !idPattern.MatchString(*s.Lease) {
		return apierr.Invalid("lease must be 32 lower-case hex characters")
	}
	if s.LeaseTTL == 0 {
		s.LeaseTTL = 30_000
	}
	if s.LeaseTTL < 0 || s.LeaseTTL > 600_000 {
		return apierr.Invalid("lease_ttl_ms must be between 1 and 600000")
	}
	if s.PTY != nil && (s.PTY.Rows == 0 || s.PTY.Cols == 0) {
		return apierr.Invalid("pty needs rows and cols over 0")
	}
	return s.checkCwd(workspace)
}

func tooLarge(total int) error {
	return apierr.Invalid("arguments and environment have %d bytes together, over the kernel's limit: write the data to a file and pass its path", total)
}

func (s *spec) checkCwd(workspace string) error {
	if s.Cwd == "" {
		s.Cwd = workspace
	}
	if strings.IndexByte(s.Cwd, 0) >= 0 {
		return apierr.Invalid("the working directory holds a NUL byte, which no path can")
	}
	if !filepath.IsAbs(s.Cwd) {
		s.Cwd = filepath.Join(workspace, s.Cwd)
	}
	info, err := os.Stat(s.Cwd)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return apierr.Invalid("the working directory %q does not exist: create it first, or give another", s.Cwd)
	case err != nil:
		return apierr.Invalid("the working directory %q cannot be used (%v): give another", s.Cwd, errors.Unwrap(err))
	case !info.IsDir():
		return apierr.Invalid("the working directory %q is no directory: give one", s.Cwd)
	}
	if unix.Access(s.Cwd, unix.X_OK) != nil {
		return apierr.Invalid("the sandbox's user may not enter the working directory %q: change its mode, or give another", s.Cwd)
	}
	return nil
}

// environment is what the command sees: init's own, the command's, the mark.
func (s *spec) environment(base []string, workspace, id string) []string {
	merged := make(map[string]string, len(base)+len(s.Env)+2)
	merged["HOME"] = workspace
	for _, entry := range base {
		name, value, _ := strings.Cut(entry, "=")
		merged[name] = value
	}
	for name, value := range s.Env {
		merged[name] = value
	}
	merged[ExecIDVariable] = id
	out := make([]string, 0, len(merged))
	for name, value := range merged {
		out = append(out, name+"="+value)
	}
	return out
}

// find looks the program up as execvp does, in the command's own PATH. The error is a failed start, with its code.
func (s *spec) find(env []string) (string, *startFailure) {
	name := s.Argv[0]
	if strings.Contains(name, "/") {
		path := name
		if !filepath.IsAbs(path) {
			path = filepath.Join(s.Cwd, path)
		}
		return path, s.checkProgram(name, path)
	}
	path := "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	for _, entry := range env {
		if value, ok := strings.CutPrefix(entry, "PATH="); ok {
			path = value
		}
	}
	var denied *startFailure
	for _, dir := range filepath.SplitList(path) {
		if !filepath.IsAbs(dir) {
			dir = filepath.Join(s.Cwd, dir)
		}
		candidate := filepath.Join(dir, name)
		failure := s.checkProgram(name, candidate)
		if failure == nil {
			return candidate, nil
		}
		if failure.code == 126 {
			denied = failure
		}
	}
	if denied != nil {
		return "", denied
	}
	return "", &startFailure{127, name + ": command not found in PATH"}
}

// startFailure is a start that failed as a shell would report it.
type startFailure struct {
	code    int
	message string
}

func (s *spec) checkProgram(name, path string) *startFailure {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR):
		if s.Command != nil {
			return &startFailure{127, shell + ": not found: this image has no shell, so give the command as a list of arguments"}
		}
		return &startFailure{127, name + ": no such file"}
	case err != nil:
		return &startFailure{126, name + ": cannot be executed: " + errnoText(err)}
	case info.IsDir():
		return &startFailure{126, name + ": is a directory"}
	case unix.Access(path, unix.X_OK) != nil:
		return &startFailure{126, name + ": permission denied: it is not executable"}
	}
	return nil
}

func errnoText(err error) string {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno.Error()
	}
	return err.Error()
}

// failureOf maps what execve or fork said. A body that is at fault is an *apierr.Error instead.
func failureOf(name string, err error) (*startFailure, error) {
	switch {
	case errors.Is(err, syscall.E2BIG):
		return nil, tooLarge(0)
	case errors.Is(err, syscall.ENOENT):
		return &startFailure{127, name + ": its interpreter or loader is missing (look at its first line, or at the libc it was built for)"}, nil
	case errors.Is(err, syscall.EAGAIN):
		return &startFailure{126, name + ": no room in the process limit of the sandbox: end other processes, or ask for a larger pids_limit"}, nil
	case errors.Is(err, syscall.ENOMEM):
		return &startFailure{126, name + ": no memory to start it: end other processes, or ask for more memory_mb"}, nil
	case errors.Is(err, syscall.ENOEXEC):
		return &startFailure{126, name + ": is no program this machine can run (a script needs a first line like #!/bin/sh)"}, nil
	}
	return &startFailure{126, name + ": cannot be executed: " + errnoText(err)}, nil
}

func (s *spec) timeout() time.Duration {
	if s.TimeoutMS == nil {
		return 0
	}
	return time.Duration(*s.TimeoutMS) * time.Millisecond
}
