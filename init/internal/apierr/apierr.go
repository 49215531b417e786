// Package apierr is the one shape of errors of the guest API: {"error":{"code","message"}} (init/API.md, "General").
package apierr

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
)

// Error is an error with the status and code it has on the wire.
type Error struct {
	Status  int
	Code    string
	Message string
}

func (e *Error) Error() string { return e.Message }

// New makes an Error; the message says what happened, to which object, and what to do next.
func New(status int, code, format string, args ...any) *Error {
	return &Error{status, code, fmt.Sprintf(format, args...)}
}

// Invalid is 400 invalid_request.
func Invalid(format string, args ...any) *Error {
	return New(http.StatusBadRequest, "invalid_request", format, args...)
}

// NotFound is 404 not_found.
func NotFound(format string, args ...any) *Error {
	return New(http.StatusNotFound, "not_found", format, args...)
}

// Conflict is 409 conflict.
func Conflict(format string, args ...any) *Error {
	return New(http.StatusConflict, "conflict", format, args...)
}

// Busy is 409 busy: a restore or an archive holds the sandbox.
func Busy(format string, args ...any) *Error {
	return New(http.StatusConflict, "busy", format, args...)
}

// Write answers with err; what is no *Error is 500 internal_error.
func Write(w http.ResponseWriter, err error) {
	var e *Error
	if !errors.As(err, &e) {
		e = New(http.StatusInternalServerError, "internal_error", "%v", err)
	}
	WriteJSON(w, e.Status, map[string]any{"error": map[string]string{"code": e.Code, "message": e.Message}})
}

// WriteJSON answers with v as JSON.
func WriteJSON(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		status, b = http.StatusInternalServerError, []byte(`{"error":{"code":"internal_error","message":"answer could not be encoded"}}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", fmt.Sprint(len(b)))
	w.WriteHeader(status)
	_, _ = w.Write(b)
}
