package process

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"hash"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"agentsandbox.dev/init/internal/apierr"
)

const (
	// ExecIDVariable marks everything that a command starts, so that it is found however it hides.
	ExecIDVariable = "SANDBOX_EXEC_ID"

	maxArgument   = 128<<10 - 1 // MAX_ARG_STRLEN less its NUL
	maxArguments  = 2 << 20     // a quarter of the usual 8 MiB stack: what execve takes of arguments and environment together
	maxTimeout    = 10 * 365 * 24 * time.Hour
	maxLease      = 10 * time.Minute
	standardLease = 30 * time.Second
	shell         = "/bin/sh"
)

// isID says whether s has the form of an id: 32 lower-case hex characters.
func isID(s string) bool {
	if len(s) != 32 {
		return false
	}
	for _, c := range []byte(s) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

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
	Forget    []string          `json:"forget"`
}

// digest tells one body from another; what is only a courtesy of this request (forget) is left out.
func (s *spec) digest() [sha256.Size]byte {
	d := digester{sha256.New()}
	d.optional(s.Command)
	d.number(int64(len(s.Argv)))
	for _, arg := range s.Argv {
		d.text(arg)
	}
	names := make([]string, 0, len(s.Env))
	for name := range s.Env {
		names = append(names, name)
	}
	slices.Sort(names)
	d.number(int64(len(names)))
	for _, name := range names {
		d.text(name)
		d.text(s.Env[name])
	}
	d.text(s.Cwd)
	if s.TimeoutMS != nil {
		d.number(*s.TimeoutMS)
	}
	d.optional(s.Lease)
	d.number(s.LeaseTTL)
	if s.Stdin {
		d.text("stdin")
	}
	if s.PTY != nil {
		d.number(int64(s.PTY.Rows)<<16 | int64(s.PTY.Cols))
	}
	return [sha256.Size]byte(d.Sum(nil))
}

// digester writes values with their lengths, so that no two lists of values look the same.
type digester struct{ hash.Hash }

func (d digester) number(n int64) {
	var b [9]byte
	b[0] = 'n'
	binary.BigEndian.PutUint64(b[1:], uint64(n))
	_, _ = d.Write(b[:])
}

func (d digester) text(s string) {
	d.number(int64(len(s)))
	_, _ = d.Write([]byte(s))
}

func (d digester) optional(s *string) {
	if s == nil {
		_, _ = d.Write([]byte{0})
		return
	}
	d.text(*s)
}

// check refuses what the kernel would refuse, with words that help, and fills in what was left out.
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
	if err := s.checkSizes(); err != nil {
		return err
	}
	if s.TimeoutMS != nil && (*s.TimeoutMS <= 0 || *s.TimeoutMS > maxTimeout.Milliseconds()) {
		return apierr.Invalid("timeout_ms must be between 1 and %d", maxTimeout.Milliseconds())
	}
	if s.Lease != nil && !isID(*s.Lease) {
		return apierr.Invalid("lease must be 32 lower-case hex characters")
	}
	if s.LeaseTTL == 0 {
		s.LeaseTTL = standardLease.Milliseconds()
	}
	if s.LeaseTTL < 0 || s.LeaseTTL > maxLease.Milliseconds() {
		return apierr.Invalid("lease_ttl_ms must be between 1 and %d", maxLease.Milliseconds())
	}
	if s.PTY != nil && (s.PTY.Rows == 0 || s.PTY.Cols == 0) {
		return apierr.Invalid("pty needs rows and cols over 0")
	}
	return s.checkCwd(workspace)
}

func (s *spec) checkSizes() error {
	total := 0
	for i, arg := range s.Argv {
		if strings.IndexByte(arg, 0) >= 0 {
			return apierr.Invalid("argument %d holds a NUL byte, which no argument can: write such data to a file", i)
		}
		if len(arg) > maxArgument {
			return apierr.Invalid("argument %d has %d bytes, the kernel takes at most %d: write it to a file and pass its path", i, len(arg), maxArgument)
		}
		total += len(arg) + 9 // its NUL and its pointer
	}
	for name, value := range s.Env {
		if name == "" || strings.ContainsAny(name, "=\x00") {
			return apierr.Invalid("%q is no name of an environment variable: it must not be empty and hold neither '=' nor NUL", shown(name))
		}
		if strings.IndexByte(value, 0) >= 0 {
			return apierr.Invalid("the value of the environment variable %s holds a NUL byte, which no value can", shown(name))
		}
		if len(name)+len(value)+1 > maxArgument {
			return apierr.Invalid("the environment variable %s is over %d bytes: write it to a file and pass its path", shown(name), maxArgument)
		}
		total += len(name) + len(value) + 10
	}
	if total > maxArguments {
		return tooLarge(total)
	}
	return nil
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
	name := shown(s.Cwd)
	info, err := os.Stat(s.Cwd)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return apierr.Invalid("the working directory %q does not exist: create it first, or give another", name)
	case err != nil:
		return apierr.Invalid("the working directory %q cannot be used (%s): give another", name, errnoText(err))
	case !info.IsDir():
		return apierr.Invalid("the working directory %q is no directory: give one", name)
	}
	if unix.Access(s.Cwd, unix.X_OK) != nil {
		return apierr.Invalid("the sandbox's user may not enter the working directory %q: change its mode, or give another", name)
	}
	return nil
}

func (s *spec) timeout() time.Duration {
	if s.TimeoutMS == nil {
		return 0
	}
	return time.Duration(*s.TimeoutMS) * time.Millisecond
}

// environment is what the command sees: init's own, a home, the command's, the mark.
func (s *spec) environment(base []string, workspace, id string) []string {
	out := make([]string, 0, len(base)+len(s.Env)+2)
	home := "HOME=" + workspace
	for _, entry := range base {
		name, value, _ := strings.Cut(entry, "=")
		if _, replaced := s.Env[name]; replaced || name == ExecIDVariable {
			continue
		}
		if name == "HOME" {
			// The engine gives "/" to a user that the image does not know; nobody can write there.
			if value != "" && value != "/" {
				home = entry
			}
			continue
		}
		out = append(out, entry)
	}
	if _, given := s.Env["HOME"]; !given {
		out = append(out, home)
	}
	for name, value := range s.Env {
		if name != ExecIDVariable {
			out = append(out, name+"="+value)
		}
	}
	return append(out, ExecIDVariable+"="+id)
}

// shown shortens what goes into a message.
func shown(s string) string {
	const limit = 200
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit], "") + "…"
}
