package netguard

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Apply loads the table of c into the current network namespace, in the place of an earlier one, atomically.
func Apply(c Config) error {
	conn, err := dial()
	if err != nil {
		return err
	}
	defer conn.close()
	if err := conn.commit(load(chains(c))); err != nil {
		if errors.Is(err, unix.EPERM) {
			return fmt.Errorf("%w: netguard needs CAP_NET_ADMIN in the sandbox's network namespace", err)
		}
		return err
	}
	return nil
}

// load is the transaction that replaces the table: made (so that the delete cannot fail), deleted with all that is in it, made anew.
func load(cs []chain) []message {
	table := func(kind, flags uint16, what string) message {
		return message{kind: subsystem(kind), flags: flags, family: unix.NFPROTO_INET, attrs: attrText(unix.NFTA_TABLE_NAME, tableName), what: what}
	}
	messages := []message{
		table(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, "a table of family inet"),
		table(unix.NFT_MSG_DELTABLE, 0, "to delete the old table"),
		table(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, "a table of family inet"),
	}
	for _, ch := range cs {
		messages = append(messages, message{
			kind: subsystem(unix.NFT_MSG_NEWCHAIN), flags: unix.NLM_F_CREATE, family: unix.NFPROTO_INET, what: "chain " + ch.name,
			attrs: join(attrText(unix.NFTA_CHAIN_TABLE, tableName), attrText(unix.NFTA_CHAIN_NAME, ch.name),
				nested(unix.NFTA_CHAIN_HOOK, attr32(unix.NFTA_HOOK_HOOKNUM, ch.hook), attr32(unix.NFTA_HOOK_PRIORITY, 0)),
				attr32(unix.NFTA_CHAIN_POLICY, ch.policy), attrText(unix.NFTA_CHAIN_TYPE, "filter")),
		})
		for i, r := range ch.rules {
			messages = append(messages, message{
				kind: subsystem(unix.NFT_MSG_NEWRULE), flags: unix.NLM_F_CREATE | unix.NLM_F_APPEND, family: unix.NFPROTO_INET,
				what: fmt.Sprintf("rule %d of chain %s", i+1, ch.name),
				attrs: join(attrText(unix.NFTA_RULE_TABLE, tableName), attrText(unix.NFTA_RULE_CHAIN, ch.name),
					nested(unix.NFTA_RULE_EXPRESSIONS, encodeRule(r)...)),
			})
		}
	}
	return messages
}

func encodeRule(r rule) [][]byte {
	parts := make([][]byte, len(r))
	for i, e := range r {
		parts[i] = nested(unix.NFTA_LIST_ELEM, attrText(unix.NFTA_EXPR_NAME, e.name), nested(unix.NFTA_EXPR_DATA, e.attrs))
	}
	return parts
}

// Verify reads the table back and says how it differs from what c asks for; nil means that it is exactly there.
func Verify(c Config) error {
	conn, err := dial()
	if err != nil {
		return err
	}
	defer conn.close()
	got, err := read(conn)
	if err != nil {
		return err
	}
	want, err := describe(chains(c))
	if err != nil {
		return err
	}
	if got == nil {
		return fmt.Errorf("table inet %s is not there: run netguard without --verify", tableName)
	}
	for i := range max(len(got), len(want)) {
		switch {
		case i >= len(got):
			return fmt.Errorf("table inet %s lacks %q: run netguard without --verify", tableName, want[i])
		case i >= len(want):
			return fmt.Errorf("table inet %s has %q, which the config does not ask for: run netguard without --verify", tableName, got[i])
		case got[i] != want[i]:
			return fmt.Errorf("table inet %s has %q where %q should be: run netguard without --verify", tableName, got[i], want[i])
		}
	}
	return nil
}

// describe gives the lines that read would give for these chains.
func describe(cs []chain) ([]string, error) {
	lines := []string{"table flags 0"}
	cs = slices.Clone(cs)
	slices.SortFunc(cs, func(a, b chain) int { return strings.Compare(a.name, b.name) })
	for _, ch := range cs {
		lines = append(lines, chainLine(ch.name, "filter", ch.hook, 0, ch.policy))
		for _, r := range ch.rules {
			text, err := ruleText(join(encodeRule(r)...))
			if err != nil {
				return nil, err
			}
			lines = append(lines, text)
		}
	}
	return lines, nil
}

func chainLine(name, kind string, hook, priority, policy uint32) string {
	return fmt.Sprintf("chain %s type %s hook %d priority %d policy %d", name, kind, hook, int32(priority), policy)
}

// read gives the table of this namespace as lines: its flags (a dormant table does nothing), then each chain by name with its rules. nil: no table.
func read(conn *connection) ([]string, error) {
	var table []string
	err := conn.dump(unix.NFT_MSG_GETTABLE, unix.NFPROTO_INET, nil, func(b []byte) error {
		t, err := fields(b)
		if err == nil && t.text(unix.NFTA_TABLE_NAME) == tableName {
			table = []string{fmt.Sprintf("table flags %d", t.number(unix.NFTA_TABLE_FLAGS))}
		}
		return err
	})
	if err != nil || table == nil {
		return nil, err
	}
	heads, rules := map[string]string{}, map[string][]string{}
	err = conn.dump(unix.NFT_MSG_GETCHAIN, unix.NFPROTO_INET, nil, func(b []byte) error {
		ch, err := fields(b)
		if err != nil || ch.text(unix.NFTA_CHAIN_TABLE) != tableName {
			return err
		}
		hook, err := fields(ch[unix.NFTA_CHAIN_HOOK])
		if err != nil {
			return err
		}
		name := ch.text(unix.NFTA_CHAIN_NAME)
		heads[name] = chainLine(name, ch.text(unix.NFTA_CHAIN_TYPE), hook.number(unix.NFTA_HOOK_HOOKNUM),
			hook.number(unix.NFTA_HOOK_PRIORITY), ch.number(unix.NFTA_CHAIN_POLICY))
		return nil
	})
	if err != nil {
		return nil, err
	}
	err = conn.dump(unix.NFT_MSG_GETRULE, unix.NFPROTO_INET, attrText(unix.NFTA_RULE_TABLE, tableName), func(b []byte) error {
		r, err := fields(b)
		if err != nil || r.text(unix.NFTA_RULE_TABLE) != tableName {
			return err
		}
		text, err := ruleText(r[unix.NFTA_RULE_EXPRESSIONS])
		name := r.text(unix.NFTA_RULE_CHAIN)
		rules[name] = append(rules[name], text)
		return err
	})
	if err != nil {
		return nil, err
	}
	names := make([]string, 0, len(heads))
	for name := range heads {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		table = append(append(table, heads[name]), rules[name]...)
	}
	return table, nil
}

// attributes are decoded by type; the last of a type wins.
type attributes map[uint16][]byte

func fields(b []byte) (attributes, error) {
	a := attributes{}
	err := each(b, func(kind uint16, data []byte) error {
		a[kind] = data
		return nil
	})
	return a, err
}

func (a attributes) text(kind uint16) string { return strings.TrimRight(string(a[kind]), "\x00") }

func (a attributes) number(kind uint16) uint32 {
	if len(a[kind]) != 4 {
		return 0
	}
	return binary.BigEndian.Uint32(a[kind])
}

// ruleText is a rule as text: every expression with all its attributes, so that two rules with the same text do the same.
func ruleText(b []byte) (string, error) {
	var words []string
	err := each(b, func(_ uint16, element []byte) error {
		e, err := fields(element)
		if err != nil {
			return err
		}
		name := e.text(unix.NFTA_EXPR_NAME)
		text, err := attributesText(name, e[unix.NFTA_EXPR_DATA])
		words = append(words, name+"("+text+")")
		return err
	})
	return strings.Join(words, " "), err
}

// bitwiseOperation is NFTA_BITWISE_OP, which x/sys does not name.
const bitwiseOperation = 6

func attributesText(expression string, b []byte) (string, error) {
	var words []string
	err := each(b, func(kind uint16, data []byte) error {
		if expression == "bitwise" && kind == bitwiseOperation && len(data) == 4 && binary.BigEndian.Uint32(data) == 0 {
			return nil // Newer kernels add the operation; 0 is the one that all kernels have, mask and xor.
		}
		words = append(words, fmt.Sprintf("%d=%s", kind, hex.EncodeToString(clearNested(data, isNested(expression, kind)))))
		return nil
	})
	slices.Sort(words)
	return strings.Join(words, " "), err
}

// isNested says which attributes hold attributes: their inner type fields carry a flag that the kernel sets in its own way.
func isNested(expression string, kind uint16) bool {
	switch expression {
	case "cmp":
		return kind == unix.NFTA_CMP_DATA
	case "bitwise":
		return kind == unix.NFTA_BITWISE_MASK || kind == unix.NFTA_BITWISE_XOR
	case "immediate":
		return kind == unix.NFTA_IMMEDIATE_DATA
	}
	return false
}

func clearNested(b []byte, nested bool) []byte {
	if !nested || len(b) < attrHeader {
		return b
	}
	b = slices.Clone(b)
	binary.NativeEndian.PutUint16(b[2:], binary.NativeEndian.Uint16(b[2:])&typeMask)
	return b
}
