"""Average the models of two sites with NVFlare; within each site, two workers train over ringfence.

    ringfence secret new run.secret
    export RINGFENCE_SECRET_FILE=$PWD/run.secret
    python examples/nvflare/job.py

NVFlare's simulator runs the server and both sites on this machine. A real site has a secret or a policy of its own, in the
environment of its NVFlare client.
"""

import argparse
import os
from pathlib import Path

from net import Net
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.client.config import ExchangeFormat
from nvflare.recipe import SimEnv

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workspace", default="simulation")
    options = parser.parse_args()
    recipe = FedAvgRecipe(
        name="circles",
        model=Net(),
        min_clients=options.sites,
        num_rounds=options.rounds,
        train_script=str(HERE / "client.py"),
        launch_external_process=True,
        command="ringfence run --nproc-per-node 2",  # in place of `python3 -u`
        shutdown_timeout=60.0,  # seconds that workers have to end by themselves
        server_expected_format=ExchangeFormat.PYTORCH,
        key_metric="loss",
        key_metric_mode="min",
    )
    run = recipe.execute(SimEnv(num_clients=options.sites, workspace_root=os.path.abspath(options.workspace)))
    print("Result:", run.get_result())


if __name__ == "__main__":
    main()
