fedlightning configs copy data/tabular models/tabular_regressor algorithms/fedavg algorithms/fedprox
fedlightning partition --config configs/data/tabular.yaml
fedlightning compare --config configs/data/tabular.yaml --config configs/models/tabular_regressor.yaml \
    configs/algorithms/fedavg.yaml configs/algorithms/fedprox.yaml \
    --trainer.max_rounds 10 --seeds 2 --out runs/table
