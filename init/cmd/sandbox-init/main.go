// sandbox-init is PID 1 of a sandbox (`serve`), the bridge to it (`connect`), and the packet filter of its network (`netguard`).
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"

	"agentsandbox.dev/init/internal/archive"
	"agentsandbox.dev/init/internal/bridge"
	"agentsandbox.dev/init/internal/files"
	"agentsandbox.dev/init/internal/gate"
	"agentsandbox.dev/init/internal/netguard"
	"agentsandbox.dev/init/internal/process"
	"agentsandbox.dev/init/internal/server"
)

// version is set by the build.
var version = "dev"

const (
	// threads is what init may need at once: its two running ones, the runtime's own, and one for each connection's blocking call. They are made at
	// start, since a full process table kills a Go program that needs one more.
	threads     = 14
	memoryLimit = 12 << 20
)

func main() {
	command := ""
	if len(os.Args) > 1 {
		command = os.Args[1]
	}
	switch command {
	case "serve":
		server.Detach()
		os.Exit(serve(os.Args[2:]))
	case "connect":
		server.Detach()
		runtime.GOMAXPROCS(1)
		debug.SetGCPercent(-1) // two buffers for its whole life: nothing to collect
		os.Exit(connect(os.Args[2:]))
	case "netguard":
		os.Exit(netguard.Main(os.Args[2:], os.Stdout))
	case "version":
		_ = json.NewEncoder(os.Stdout).Encode(map[string]any{"version": version, "api": server.API, "arch": runtime.GOARCH})
	default:
		fmt.Fprintln(os.Stderr, "usage: sandbox-init serve | connect | netguard | version")
		os.Exit(2)
	}
}

func connect(args []string) int {
	flags := flag.NewFlagSet("connect", flag.ExitOnError)
	socket := flags.String("socket", server.Socket, "for tests: another socket, whose owner is not checked")
	_ = flags.Parse(args)
	return bridge.Run(*socket, *socket == server.Socket)
}

func serve(args []string) int {
	flags := flag.NewFlagSet("serve", flag.ExitOnError)
	workspace := flags.String("workspace", "/workspace", "the folder that files, snapshots and restores are about")
	tmp := flags.String("tmp", "/tmp", "the folder that a restore empties")
	socket := flags.String("socket", server.Socket, "for tests: another socket, open to every peer")
	_ = flags.Parse(args)

	runtime.GOMAXPROCS(2)
	debug.SetGCPercent(50)
	debug.SetMemoryLimit(memoryLimit)
	makeThreads()

	// Whatever can be caught is caught and dropped: a signal from inside must not end PID 1. SIGKILL and SIGSTOP from inside never reach it.
	dropped := make(chan os.Signal, 64)
	signal.Notify(dropped)
	children := make(chan struct{}, 1)
	go func() {
		for s := range dropped {
			if s == syscall.SIGCHLD {
				select {
				case children <- struct{}{}:
				default:
				}
			}
		}
	}()

	if err := archive.Recover(*workspace); err != nil {
		fmt.Fprintf(os.Stderr, "sandbox-init: the workspace cannot be recovered after an interrupted restore: %v\n", err)
		return 1
	}
	g := &gate.Gate{}
	processes := process.New(process.Config{Workspace: *workspace, Env: commandEnvironment()}, g)
	go processes.Reap(children)
	config := server.Config{Version: version, Workspace: *workspace}
	if *socket != server.Socket {
		config.AllowPeer = func(int) bool { return true }
	}
	s := server.New(config, g, processes)
	files.New(*workspace, g).Register(s.Mux())
	archive.New(archive.Config{Workspace: *workspace, Tmp: *tmp}, g, processes).Register(s.Mux())

	listener, err := server.Listen(*socket)
	if err != nil {
		fmt.Fprintf(os.Stderr, "sandbox-init: the socket cannot be bound: %v\n", err)
		return 1
	}
	// From here on connections are taken, so whoever started the container need not try one to know.
	fmt.Println("ready")
	// Children that ended before the handler was there sent their signal to nobody.
	children <- struct{}{}
	if err := s.Serve(listener); err != nil {
		fmt.Fprintf(os.Stderr, "sandbox-init: %v\n", err)
		return 1
	}
	return 0
}

// commandEnvironment is init's own environment less what a cluster adds for its own services.
func commandEnvironment() []string {
	var kept []string
	for _, entry := range os.Environ() {
		if !strings.HasPrefix(entry, "KUBERNETES_") {
			kept = append(kept, entry)
		}
	}
	return kept
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
