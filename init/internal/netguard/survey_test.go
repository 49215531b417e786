package netguard

import (
	"bytes"
	"encoding/json"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func TestResolversAreTheNameserverLinesThatHoldAnAddress(t *testing.T) {
	text := "# nameserver 9.9.9.9\nsearch example.org\nnameserver 1.2.3.4\nnameserver\tfe80::1%eth0\n nameserver ::ffff:5.6.7.8\nnameserver nonsense\nnameserver\n"
	got, err := parseResolvers(strings.NewReader(text))
	want := []netip.Addr{netip.MustParseAddr("1.2.3.4"), netip.MustParseAddr("fe80::1"), netip.MustParseAddr("5.6.7.8")}
	if err != nil || !slices.Equal(got, want) {
		t.Fatalf("got %v, %v", got, err)
	}
}

func TestASurveyPrintsTheAddressesOfThisNetworkAndItsResolvers(t *testing.T) {
	var out bytes.Buffer
	if code := Main([]string{"--survey"}, &out); code != 0 {
		t.Fatalf("exit code %d: %s", code, out.String())
	}
	var found struct {
		Addresses []netip.Addr `json:"addresses"`
		Resolvers []netip.Addr `json:"resolvers"`
	}
	if err := json.Unmarshal(out.Bytes(), &found); err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(found.Addresses, netip.MustParseAddr("127.0.0.1")) || found.Resolvers == nil {
		t.Fatalf("got %s", out.String())
	}
}
