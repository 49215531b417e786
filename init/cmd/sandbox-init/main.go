// sandbox-init is PID 1 of a sandbox (`serve`), the bridge to it (`connect`), and the packet filter of its network (`netguard`). It can also copy
// itself to where it is wanted (`install`).
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"agentsandbox.dev/init/internal/archive"
	"agentsandbox.dev/init/internal/bridge"
	"agentsandbox.dev/init/internal/files"
	"agentsandbox.dev/init/internal/gate"
	"agentsandbox.dev/init/internal/netguard"
	"agentsandbox.dev/init/internal/process"
	"agentsandbox.dev/init/internal/server"
	"agentsandbox.dev/init/internal/sys"
)

// version is set by the build.
var version = "dev"

const (
	processors = 2
	// threads is what init may need at once beside the runtime's own: a blocking call for every connection and for every kill that looks at /proc, and
	// its processors. They are made at start, since a full process table kills a Go program that needs one more.
	threads    = server.MaxConnections + 2 + processors
	baseMemory = 10 << 20 // what init itself may use; the journals come on top
)

func main() {
	command := ""
	if len(os.Args) > 1 {
		command = os.Args[1]
	}
	switch command {
	case "serve":
		hide()
		os.Exit(serve(os.Args[2:]))
	case "connect":
		hide()
		os.Exit(connect(os.Args[2:]))
	case "install":
		os.Exit(install(os.Args[2:]))
	case "reach":
		os.Exit(reach(os.Args[2:]))
	case "netguard":
		os.Exit(netguard.Main(os.Args[2:], os.Stdout))
	case "version":
		_ = json.NewEncoder(os.Stdout).Encode(map[string]any{"version": version, "api": server.API, "arch": runtime.GOARCH})
	default:
		fmt.Fprintln(os.Stderr, "usage: sandbox-init serve | connect | install | reach | netguard | version")
		os.Exit(2)
	}
}

// hide makes this process one that its own user can neither trace nor read. It must be the first thing it does.
func hide() { _ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0) }

func connect(args []string) int {
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(-1) // two buffers for its whole life: nothing to collect
	flags := flag.NewFlagSet("connect", flag.ExitOnError)
	socket := flags.String("socket", server.Socket, "for tests: another socket, whose owner is not checked")
	_ = flags.Parse(args)
	return bridge.Run(*socket, *socket == server.Socket, 0, 1, os.Stderr)
}

func serve(args []string) int {
	flags := flag.NewFlagSet("serve", flag.ExitOnError)
	workspace := flags.String("workspace", "/workspace", "the folder that files, snapshots and restores are about")
	tmp := flags.String("tmp", "/tmp", "the folder that a restore empties")
	socket := flags.String("socket", server.Socket, "for tests: another socket, open to every peer")
	_ = flags.Parse(args)

	budget := process.JournalBudget()
	runtime.GOMAXPROCS(processors)
	debug.SetGCPercent(50)
	debug.SetMemoryLimit(int64(baseMemory + budget + budget/4))
	children := catchSignals()
	makeThreads()

	if err := archive.Recover(*workspace); err != nil {
		return fail("the workspace cannot be recovered after an interrupted restore", err)
	}
	g := &gate.Gate{}
	processes, err := process.New(process.Config{Workspace: *workspace, Env: process.CommandEnvironment(os.Environ()), Budget: budget}, g)
	if err != nil {
		return fail("the process table cannot be set up", err)
	}
	config := server.Config{Version: version, Workspace: *workspace}
	if *socket != server.Socket {
		config.AllowPeer = func(int) bool { return true }
	}
	s := server.New(config, g, processes)
	files.New(*workspace, g).Register(s.Mux())
	archives := archive.New(archive.Config{Workspace: *workspace, Tmp: *tmp}, g, processes)
	archives.Register(s.Mux())
	if *socket == server.Socket {
		archives.Clean()
	}

	listener, err := server.Listen(*socket)
	if err != nil {
		return fail("the socket cannot be bound", err)
	}
	// From here on connections are taken, so whoever started the container need not try one to know.
	fmt.Println("ready")
	go processes.Reap(children)
	go processes.Guard()
	if err := s.Serve(listener); err != nil {
		return fail("serving ended", err)
	}
	return 0
}

func fail(what string, err error) int {
	fmt.Fprintf(os.Stderr, "sandbox-init: %s: %v\n", what, err)
	return 1
}

// catchSignals catches and drops whatever can be caught: no signal from inside may end PID 1. (The kernel lets no SIGKILL or SIGSTOP from inside
// through.) It returns the signals that a child ended; one is there already, for children that ended before.
func catchSignals() <-chan os.Signal {
	dropped := make(chan os.Signal, 1) // what finds no room is dropped even sooner
	signal.Notify(dropped)
	go func() {
		for range dropped {
		}
	}()
	children := make(chan os.Signal, 1)
	signal.Notify(children, syscall.SIGCHLD)
	select {
	case children <- syscall.SIGCHLD:
	default:
	}
	if err := sys.DropSentFaults(); err != nil {
		fmt.Fprintf(os.Stderr, "sandbox-init: sent fault signals are not caught: %v\n", err)
	}
	return children
}

// makeThreads has the runtime create its threads now: each goroutine holds one until all have theirs. The runtime keeps them for later.
func makeThreads() {
	var all, held sync.WaitGroup
	all.Add(threads)
	held.Add(threads)
	for range threads {
		go func() {
			runtime.LockOSThread()
			all.Done()
			all.Wait()
			runtime.UnlockOSThread()
			held.Done()
		}()
	}
	held.Wait()
}
