// Package netguard is the command that closes private networks to a sandbox (init/API.md, "Command line"): it loads one nftables table
// into the network namespace that it runs in. It speaks netlink itself, so that it needs no nft program and no library.
package netguard

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
)

// Main runs the command with the arguments after its name, prints one JSON line and returns the exit code: 0 only when the rules are in force.
func Main(args []string, stdout io.Writer) int {
	if len(args) == 1 && args[0] == "--survey" {
		return survey(stdout)
	}
	flags := flag.NewFlagSet("netguard", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	encoded := flags.String("config", "", "what to block, as base64 JSON")
	verify := flags.Bool("verify", false, "only read the rules back")
	err := flags.Parse(args)
	if err == nil && flags.NArg() > 0 {
		err = fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if err != nil {
		return fail(stdout, "invalid_request", err)
	}
	config, err := ParseConfig(*encoded)
	if err != nil {
		return fail(stdout, "invalid_request", err)
	}
	if !*verify {
		err = Apply(config)
	}
	// Also after a load: the kernel's own account is what counts.
	if err == nil {
		err = Verify(config)
	}
	if err != nil {
		return fail(stdout, "netguard_failed", err)
	}
	rules := 0
	for _, ch := range chains(config) {
		rules += len(ch.rules)
	}
	if err := print(stdout, map[string]any{"table": "inet " + tableName, "rules": rules, "verified": true}); err != nil {
		return 1
	}
	return 0
}

func fail(stdout io.Writer, code string, err error) int {
	_ = print(stdout, map[string]any{"error": map[string]string{"code": code, "message": err.Error()}})
	return 1
}

func print(w io.Writer, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = w.Write(append(b, '\n'))
	return err
}
