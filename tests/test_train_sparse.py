"""The example that trains with selected blocks of keys: gradients, losses and selected blocks."""

from typing import Any

import pytest

from tests import scripts

torch = pytest.importorskip("torch")
SHORT = ["--device", "cpu", "--steps", "12", "--tokens", "150", "--length", "60", "--block-size", "4"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return scripts.training_example("train_sparse", monkeypatch)


def difference_in(said: str) -> float:
    return float(said.partition("relative difference of a gradient: ")[2].split()[0])


@pytest.mark.parametrize("backend", [[], ["--backend", "reference", "--tokens", "60"]])
def test_the_gradient_is_that_of_a_dense_mask_and_the_loss_falls(script, capsys, backend):
    assert script["main"]([*SHORT, *backend]) == 0
    assert difference_in(capsys.readouterr().out) < script["BOUND"]


def test_keys_that_no_list_names_show(script, capsys):
    main = script["main"]
    right = main.__globals__["varlen_attention"]

    def dense(*given: Any, selected: Any, block_size: int, **named: Any) -> Any:
        return right(*given, **named)

    main.__globals__["varlen_attention"] = dense
    assert main([*SHORT, "--steps", "1", "--blocks", "2"]) == 1
    assert difference_in(capsys.readouterr().out) > 1e-3


def test_a_loss_that_stays_shows(script):
    assert script["main"]([*SHORT, "--rate", "0"]) == 1


def test_queries_select_blocks_of_their_own_document(script):
    row = script["row_of"]([torch.arange(length + 1) for length in (30, 1, 14)])
    arguments = script["main"].__globals__["argparse"].Namespace(block_size=4, blocks=3, backend=None)
    q, k = torch.randn(45, 8, 16, requires_grad=True), torch.randn(45, 2, 16, requires_grad=True)
    lists = script["selected_blocks"](q, k, row, arguments)
    own = row.positions // 4
    assert lists.shape == (45, 2, 3)
    assert (lists.amax(2) == own[:, None]).all()
    assert ((lists >= 0).sum(2) == (own + 1).clamp(max=3)[:, None]).all()

    wanted = q.detach()[:, 4:].mean(1)  # the mean of the queries that share KV head 1
    scores = wanted[29] @ k.detach()[:30, 1].T
    best = torch.nn.functional.pad(scores, (0, 2), value=-torch.inf).view(8, 4).amax(1)[:7].topk(2).indices
    assert lists[29, 1].tolist() == [*sorted(best.tolist()), 7]
