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

# What runs on the cluster in `make test`; SLOW=1 adds storms of kill -9, lost nodes and mass runs (half an hour more).
SLOW ?=
CHOSEN := $(if $(SLOW),,-m "not slow")

.PHONY: test-cluster
test-cluster: guest ## bring the test cluster up with two nodes, prove it and all that runs on it, take it down (SLOW=1: all)
	$(CLUSTER) up --nodes 2
	export NAME=$(NAME) PROVIDER=$(PROVIDER) NODES=2 AGENT_SANDBOX_TEST_IMAGE=localhost/python:1; status=0; \
	$(BIN)/pytest tests/cluster $(CHOSEN) && $(BIN)/pytest tests/contract --backends kubernetes $(CHOSEN) || status=$$?; $(CLUSTER) down; exit $$status
