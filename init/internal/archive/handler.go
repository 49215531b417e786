// Package archive answers the archive calls of the guest API (init/API.md, "Archives").
package archive

import (
	"context"
	"net/http"

	"agentsandbox.dev/init/internal/gate"
)

// Processes is what an archive and a restore need from the processes of the sandbox.
type Processes interface {
	// Freeze stops everything but init and its bridges. thaw continues exactly what Freeze stopped; it may be called more than once, and after KillAll.
	Freeze(ctx context.Context) (thaw func(), err error)
	// KillAll ends every process but init and its bridges, frozen or not, and returns when they are dead.
	KillAll(ctx context.Context) error
	// Reset drops all journals and processes, makes a new boot id and returns it.
	Reset() (bootID string)
}

// Config says where things are; all paths are absolute.
type Config struct {
	Workspace string
	Tmp       string
}

// Handler answers the archive calls for one workspace.
type Handler struct {
	config    Config
	gate      *gate.Gate
	processes Processes
}

// New makes a Handler.
func New(c Config, g *gate.Gate, p Processes) *Handler {
	return &Handler{config: c, gate: g, processes: p}
}

// Register adds the calls to mux.
func (h *Handler) Register(mux *http.ServeMux) {}

// Recover completes or undoes an interrupted restore and clears stale staging; call it before the socket opens.
func Recover(workspace string) error { return nil }
