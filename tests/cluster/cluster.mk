# A real Kubernetes to test on; see tests/cluster/README.md. NAME, NODES=1|2, PROVIDER=own|kind|existing, IMAGE.
NAME ?= main
NODES ?= 1
PROVIDER ?= own
IMAGE ?=
CLUSTER := $(PYTHON) -m tests.cluster --name $(NAME) --provider $(PROVIDER)

.PHONY: cluster-build
cluster-build: ## build the test cluster's programs and images, nothing else
	$(CLUSTER) build

.PHONY: cluster-up
cluster-up: ## start the test cluster, or heal it (NODES=2, NAME=…, PROVIDER=own|kind|existing)
	$(CLUSTER) up --nodes $(NODES)

.PHONY: cluster-down
cluster-down: ## end the test cluster and remove everything of it
	$(CLUSTER) down

.PHONY: cluster-status
cluster-status: ## what of the test cluster runs, and what is missing
	$(CLUSTER) status

.PHONY: cluster-logs
cluster-logs: ## the last lines of every component's log
	$(CLUSTER) logs

.PHONY: cluster-load
cluster-load: ## put an image of buildah's or docker's into every node (IMAGE=name or archive)
	@test -n "$(IMAGE)" || { echo "which image? make cluster-load IMAGE=localhost/name:tag (or an archive's path)" >&2; exit 2; }
	$(CLUSTER) load $(IMAGE)

# What runs on the cluster in `make test`: the cluster itself, the CRDs, the Kubernetes layer, snapshots and edits. SLOW=1 runs everything there is (an hour).
SLOW ?=
CHOSEN := $(if $(SLOW),tests/cluster,-m "not slow" tests/cluster/test_layout.py tests/cluster/test_lifecycle.py tests/cluster/test_nodes.py tests/cluster/test_smoke.py \
	tests/cluster/crds tests/cluster/e2e/test_mover_snapshots.py tests/cluster/e2e/test_operator_edits.py)

.PHONY: test-cluster
test-cluster: guest ## bring the test cluster up with two nodes, prove it and what runs on it, take it down (SLOW=1: all)
	$(CLUSTER) up --nodes 2
	status=0; NAME=$(NAME) PROVIDER=$(PROVIDER) NODES=2 $(BIN)/pytest $(CHOSEN) || status=$$?; $(CLUSTER) down; exit $$status

.PHONY: test-cluster-contract
test-cluster-contract: guest ## the HTTP contract over the Kubernetes backend, on a cluster that is up; needs a kubelet with a process limit for pods
	NAME=$(NAME) PROVIDER=$(PROVIDER) NODES=$(NODES) AGENT_SANDBOX_TEST_IMAGE=localhost/python:1 $(BIN)/pytest tests/contract --backends kubernetes -m "not slow"
