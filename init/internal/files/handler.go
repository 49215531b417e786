// Package files answers the file calls of the guest API (init/API.md, "Files"). It holds the rule where writes may go and what may be read; it has
// the sandboxed code's own uid, so the rule is a part of the contract (a link cannot lead a caller's write astray) and no privilege boundary.
package files

import (
	"net/http"
	"net/url"
	"strconv"

	"agentsandbox.dev/init/internal/apierr"
	"agentsandbox.dev/init/internal/gate"
)

// Handler answers the file calls for one workspace.
type Handler struct {
	workspace string
	gate      *gate.Gate
}

// New makes a Handler; workspace is an absolute path.
func New(workspace string, g *gate.Gate) *Handler {
	return &Handler{workspace: workspace, gate: g}
}

// Register adds the calls to mux.
func (h *Handler) Register(mux *http.ServeMux) {
	for pattern, call := range map[string]func(http.ResponseWriter, *http.Request, query) error{
		"GET /v1/files":    h.read,
		"PUT /v1/files":    h.write,
		"DELETE /v1/files": h.remove,
		"GET /v1/stat":     h.stat,
		"GET /v1/list":     h.list,
		"POST /v1/mkdir":   h.makeDir,
		"POST /v1/move":    h.move,
	} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			q, err := parseQuery(r.URL.RawQuery)
			if err == nil {
				err = call(w, r, q)
			}
			if err != nil {
				apierr.Write(w, err)
			}
		})
	}
}

// query is a parsed query string; what cannot be parsed is an error, never a missing value.
type query url.Values

func parseQuery(raw string) (query, error) {
	values, err := url.ParseQuery(raw)
	if err != nil {
		return nil, apierr.Invalid("the query cannot be read (%v): percent-encode every byte of a path that is no letter or digit", err)
	}
	return query(values), nil
}

func (q query) get(name string) string { return url.Values(q).Get(name) }

// path returns a path parameter after the checks that need no file system.
func (q query) path(name string) (string, error) {
	p := q.get(name)
	if err := checkPath(p); err != nil {
		return "", err
	}
	return p, nil
}

// flag reads "0" or "1"; absent is false.
func (q query) flag(name string) (bool, error) {
	switch q.get(name) {
	case "", "0":
		return false, nil
	case "1":
		return true, nil
	}
	return false, apierr.Invalid("%s must be 0 or 1", name)
}

// mode reads 3 or 4 octal digits up to 0777.
func (q query) mode(standard uint32) (uint32, error) {
	s := q.get("mode")
	if s == "" {
		return standard, nil
	}
	m, err := strconv.ParseUint(s, 8, 32)
	if err != nil || len(s) < 3 || len(s) > 4 || m > 0o777 {
		return 0, apierr.Invalid("mode %q is not allowed: give 3 or 4 octal digits, at most 0777", s)
	}
	return uint32(m), nil
}

// limit reads max_bytes; absent is no limit.
func (q query) limit() (limit int64, limited bool, err error) {
	s := q.get("max_bytes")
	if s == "" {
		return 0, false, nil
	}
	limit, err = strconv.ParseInt(s, 10, 64)
	if err != nil || limit < 0 {
		return 0, false, apierr.Invalid("max_bytes must be a number of bytes")
	}
	return limit, true, nil
}
