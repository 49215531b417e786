module agentsandbox.dev/init

go 1.25.0
