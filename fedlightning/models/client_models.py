"""Networks of differing architecture, one for each client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from lightning.pytorch import LightningModule
from torch import nn

from fedlightning.ranges import Length, check_arguments

Rule = Literal["cycle", "blocks", "size", "group"]
"""How clients get their models: in turn, in consecutive blocks, by their training samples, or by their planted group."""


class ClientModels(LightningModule):
    """The LightningModules of a federation in which clients have models of differing architecture.

    It takes the place of the one module that clients otherwise share. Each client builds, trains and deploys the module that
    it is assigned; this one is never run. All of them must take the same inputs and give outputs of the same meaning. Which
    methods work on such a federation, and what travels in them, is in docs/explanation/different_models.md.

    Args:
        models: By name, LightningModules that train themselves: loss, optimizer and metrics are each module's own. List them
            from small to large.
        assign: Who gets which: ``"cycle"`` (default): the clients in order take the models in turn; ``"blocks"``: the first
            share of the clients takes the first model, and so on; ``"size"``: as blocks, the clients ordered by their
            training samples, so that those with the most take the last model; ``"group"``: by the group that the data module
            has planted. Or a mapping from each client's id to the name of its model.
        server: Name of the model that the server keeps as the global one. With a rule no client is assigned it. ``None``
            (default): the first one, which clients have too.

    Attributes:
        models: The modules, by name.
        assign: As given.
        server: As given.

    Raises:
        ValueError: If there is no model, a name cannot be used, ``assign`` is not a rule or names an unknown model, or
            ``server`` is not among the models or is the only one.

    Example:
        >>> from fedlightning.models import MLP, Classifier, ClientModels
        >>> small, large = (Classifier(MLP(64, [width], 10), num_classes=10) for width in (8, 64))
        >>> ClientModels({"small": small, "large": large}, assign="size").assignment({"a": 50, "b": 9, "c": 20, "d": 70})
        {'a': 'large', 'b': 'small', 'c': 'small', 'd': 'large'}
    """

    def __init__(
        self,
        models: Annotated[dict[str, LightningModule], Length(note="Such as models={'small': MyModule()}.")],
        assign: Rule | dict[str, str] = "cycle",
        server: str | None = None,
    ) -> None:
        super().__init__()
        check_arguments(self, ClientModels.__init__, locals())
        for name, module in models.items():
            if not isinstance(name, str) or not name or not name.isprintable() or "." in name:
                raise ValueError(f"ClientModels got a model called {name!r}. A name is a word without dots.")
            if not isinstance(module, LightningModule) or isinstance(module, ClientModels):
                raise ValueError(
                    f"ClientModels got a {type(module).__name__} as model '{name}'. Give a LightningModule for each name."
                )
        names = ", ".join(models)
        if isinstance(assign, Mapping):
            assign = {str(client): model for client, model in assign.items()}
            for client, model in assign.items():
                if model not in models:
                    raise ValueError(f"ClientModels assigns client '{client}' the model {model!r}. There are: {names}.")
        if server is not None and server not in models:
            raise ValueError(f"ClientModels got server={server!r}. There are: {names}.")
        if server is not None and len(models) == 1 and not isinstance(assign, Mapping):
            raise ValueError(f"ClientModels keeps its only model '{server}' for the server. Add one for the clients.")
        self.models = nn.ModuleDict(models)
        self.assign = assign
        self.server = server

    def model(self, name: str) -> LightningModule:
        """Return the module of a name."""
        module = self.models[name]
        assert isinstance(module, LightningModule)
        return module

    @property
    def default(self) -> str:
        """Name of the server's model: :attr:`server`, or the first one."""
        return self.server if self.server is not None else next(iter(self.models))

    def assignment(self, num_samples: Mapping[str, int], groups: Mapping[str, int] | None = None) -> dict[str, str]:
        """Return the name of each client's model.

        Args:
            num_samples: Training samples of every client, in the clients' order.
            groups: Planted group of each client; `None` if nobody knows.

        Raises:
            ValueError: If a client has none: the mapping lacks it, or groups are not known.
        """
        clients = list(num_samples)
        if isinstance(self.assign, Mapping):
            missing = [client for client in clients if client not in self.assign]
            if missing:
                raise ValueError(
                    f"ClientModels assigns no model to client '{missing[0]}'. Name every client in assign, or use a rule."
                )
            unknown = [client for client in self.assign if client not in num_samples]
            if unknown:
                raise ValueError(
                    f"ClientModels assigns a model to client '{unknown[0]}', which the data do not have; they have "
                    f"{', '.join(clients[:10])}. Remove it from assign."
                )
            return {client: self.assign[client] for client in clients}
        names = [name for name in self.models if name != self.server]
        if self.assign == "group":
            if groups is None:
                raise ValueError(
                    "ClientModels(assign='group') goes by the groups that the data module has planted, and this one has "
                    "planted none. Use another rule, or map clients to names."
                )
            order = sorted(set(groups.values()))
            return {client: names[order.index(groups[client]) % len(names)] for client in clients}
        if self.assign == "cycle":
            return {client: names[place % len(names)] for place, client in enumerate(clients)}
        ranked: Sequence[str] = clients
        if self.assign == "size":
            ranked = sorted(clients, key=num_samples.__getitem__)  # equal ones stay in the clients' order
        name_by_client = {client: names[place * len(names) // len(clients)] for place, client in enumerate(ranked)}
        return {client: name_by_client[client] for client in clients}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: each client has a model of its own.

        Raises:
            TypeError: Always.
        """
        raise TypeError("ClientModels holds one model for each client and is none itself. Use .model(name).")
