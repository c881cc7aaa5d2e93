# SPDX-License-Identifier: Apache-2.0
"""Real Kubernetes clusters on one machine, for tests.

`Cluster` is the entry point. The parts below it do not depend on ElasticDL.
"""
