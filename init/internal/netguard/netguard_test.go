package netguard

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// inNamespace runs f in a new network namespace of its own, with lo up.
func inNamespace(t *testing.T, f func()) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("network namespaces need root")
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine, and the namespace with it
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			t.Errorf("no new network namespace: %v", err)
			return
		}
		f()
	}()
	<-done
}

func encode(text string) string { return base64.StdEncoding.EncodeToString([]byte(text)) }

// run runs Main and returns its exit code and its one line.
func run(t *testing.T, args ...string) (int, map[string]any) {
	t.Helper()
	var out bytes.Buffer
	code := Main(args, &out)
	if strings.Count(out.String(), "\n") != 1 {
		t.Fatalf("not one line: %q", out.String())
	}
	var v map[string]any
	if err := json.Unmarshal(out.Bytes(), &v); err != nil {
		t.Fatalf("not JSON: %q", out.String())
	}
	return code, v
}

const usual = `{"block":["10.0.0.0/8","172.16.0.0/12","192.168.0.0/16","169.254.0.0/16","100.64.0.0/10","fc00::/7","fe80::/10","192.0.2.7","10.0.0.0/8"],"resolvers":["10.1.2.3","fd00::53"]}`

func TestLoadedRulesVerifyAndLoadingAgainReplacesThem(t *testing.T) {
	inNamespace(t, func() {
		for range 2 {
			if code, out := run(t, "--config="+encode(usual)); code != 0 || out["verified"] != true {
				t.Errorf("load: %d %v", code, out)
			}
		}
		if code, out := run(t, "--verify", "--config="+encode(usual)); code != 0 {
			t.Errorf("verify: %d %v", code, out)
		}
		if code, out := run(t, "--config="+encode(`{"block":["0.0.0.0/0","::/0"],"resolvers":[]}`)); code != 0 {
			t.Errorf("load of another config: %d %v", code, out)
		}
		if code, out := run(t, "--verify", "--config="+encode(usual)); code != 1 {
			t.Errorf("the old config still verifies: %v", out)
		}
	})
}

func TestVerifyFailsWhereNothingWasLoaded(t *testing.T) {
	inNamespace(t, func() {
		code, out := run(t, "--verify", "--config="+encode(usual))
		if code != 1 || !strings.Contains(out["error"].(map[string]any)["message"].(string), "is not there") {
			t.Errorf("%d %v", code, out)
		}
	})
}

func TestVerifySeesEveryKindOfTampering(t *testing.T) {
	config, err := ParseConfig(encode(usual))
	if err != nil {
		t.Fatal(err)
	}
	changes := map[string]func(cs []chain) []chain{
		"a missing rule":  func(cs []chain) []chain { cs[0].rules = cs[0].rules[:len(cs[0].rules)-1]; return cs },
		"a rule in front": func(cs []chain) []chain { cs[0].rules = append([]rule{{verdict(nfAccept)}}, cs[0].rules...); return cs },
		"another order":   func(cs []chain) []chain { r := cs[0].rules; r[0], r[1] = r[1], r[0]; return cs },
		"another policy":  func(cs []chain) []chain { cs[1].policy = nfAccept; return cs },
		"another hook":    func(cs []chain) []chain { cs[1].hook = unix.NF_INET_FORWARD; return cs },
		"a missing chain": func(cs []chain) []chain { return cs[:1] },
		"one more chain": func(cs []chain) []chain {
			return append(cs, chain{name: "x", hook: unix.NF_INET_FORWARD, policy: nfAccept})
		},
		"another network": func(cs []chain) []chain {
			cs[0].rules[len(cs[0].rules)-1] = append(destination(netip.MustParsePrefix("fe80::/11")), reject())
			return cs
		},
		"accept, not reject": func(cs []chain) []chain {
			r := cs[0].rules[len(cs[0].rules)-1]
			r[len(r)-1] = verdict(nfAccept)
			return cs
		},
		"an expression before": func(cs []chain) []chain {
			r := cs[0].rules
			r[0] = append(rule{meta(unix.NFT_META_L4PROTO), equal([]byte{1})}, r[0]...)
			return cs
		},
	}
	for name, change := range changes {
		inNamespace(t, func() {
			conn, err := dial()
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.close()
			if err := conn.commit(load(change(chains(config)))); err != nil {
				t.Errorf("%s could not be loaded: %v", name, err)
			} else if err := Verify(config); err == nil {
				t.Errorf("verify did not see %s", name)
			}
		})
	}
}

func TestBlockedNetworksAreRejectedAtOnceAndLoopbackWorks(t *testing.T) {
	inNamespace(t, func() {
		up(t)
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = listener.Close() }()
		if code, out := run(t, "--config="+encode(`{"block":["0.0.0.0/0","::/0"],"resolvers":[]}`)); code != 0 {
			t.Error(out)
		}
		conn, err := net.Dial("tcp", listener.Addr().String())
		if err != nil {
			t.Errorf("loopback is closed: %v", err)
		} else {
			_ = conn.Close()
		}
	})
}

// up brings lo up in this thread's namespace.
func up(t *testing.T) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }()
	request, err := unix.NewIfreq("lo")
	if err != nil {
		t.Fatal(err)
	}
	request.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, request); err != nil {
		t.Fatal(err)
	}
}

func TestARefusedTransactionLeavesTheOldRules(t *testing.T) {
	inNamespace(t, func() {
		if code, out := run(t, "--config="+encode(usual)); code != 0 {
			t.Error(out)
		}
		conn, err := dial()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.close()
		broken := []chain{{name: "output", hook: unix.NF_INET_LOCAL_OUT, policy: nfAccept, rules: []rule{{{name: "no-such-expression"}}}}}
		if err := conn.commit(load(broken)); err == nil || !strings.Contains(err.Error(), "rule 1 of chain output") {
			t.Errorf("a broken rule gave %v", err)
		}
		if code, out := run(t, "--verify", "--config="+encode(usual)); code != 0 {
			t.Errorf("the old rules are gone: %v", out)
		}
	})
}

func TestConfigsThatCouldLeaveAHoleAreRefused(t *testing.T) {
	for _, text := range []string{
		``, `{}`, `[]`, `{"block":[]}`, `{"block":["10.0.0.0/33"]}`, `{"block":["example.com"]}`, `{"block":["10.0.0.0/8"],"resolvers":["x"]}`,
		`{"block":["10.0.0.0/8"],"resolvers":["fe80::1%eth0"]}`, `{"block":["::ffff:10.0.0.0/104"]}`, `{"block":["10.0.0.0/8"],"blocks":[]}`,
		`{"block":["10.0.0.0/8"]}{}`,
	} {
		if _, err := ParseConfig(encode(text)); err == nil {
			t.Errorf("accepted %s", text)
		}
	}
	if _, err := ParseConfig("!"); err == nil {
		t.Error("accepted what is no base64")
	}
	for _, args := range [][]string{{}, {"--config=" + encode(usual), "x"}, {"--nonsense"}} {
		if code, out := run(t, args...); code != 1 || out["error"] == nil {
			t.Errorf("%q gave %d %v", args, code, out)
		}
	}
}

func FuzzNetlinkAnswersNeverPanic(f *testing.F) {
	config, err := ParseConfig(encode(usual))
	if err != nil {
		f.Fatal(err)
	}
	for _, ch := range chains(config) {
		for _, r := range ch.rules {
			f.Add(join(encodeRule(r)...))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, err := ruleText(b); err != nil && !errors.Is(err, errDamaged) {
			t.Error(err)
		}
	})
}
