# SPDX-License-Identifier: Apache-2.0
"""Real Kubernetes clusters on one machine, for tests.

`Cluster` is the way in. The parts below it know nothing of ElasticDL.
"""
