"""Models of public libraries, tiny and with random weights, beside the plain module.

Each test needs a package of the extra ``models`` and is skipped without it. Nothing is downloaded:
every model is built from a configuration.
"""

import copy

import pytest
import torch

import samestep
from samestep import DataParallel

pytestmark = pytest.mark.slow

NUM_ROWS, NUM_REPLICAS = 7, 3
# What the order of additions does in float64, five steps of SGD later; and where the library itself
# computes the loss in float32.
CLOSE = {"rtol": 1e-9, "atol": 1e-10}
CLOSE_IN_FLOAT = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


def small(**more):
    return {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 40,
        "pad_token_id": 0,
        **more,
    }


def tokens(length=9, num_rows=NUM_ROWS, low=3):
    return torch.randint(low, 50, (num_rows, length))


def padded(length=9):
    """Tokens and the mask of rows of different lengths."""
    lengths = torch.tensor([length, 4, 6, length, 3, 5, 8])
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    return tokens(length) * mask, mask


def make_bert(transformers, dropout=0.0):
    config = transformers.BertConfig(
        **small(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=3)
    )
    ids, mask = padded()
    labels = torch.randint(3, (NUM_ROWS,))
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return transformers.BertForSequenceClassification(config), inputs


def make_gpt2(transformers, dropout=0.0):
    config = transformers.GPT2Config(
        vocab_size=50,
        n_positions=40,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    ids = tokens()
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def make_t5(transformers, dropout=0.0):
    config = transformers.T5Config(
        vocab_size=50,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        dropout_rate=dropout,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
    )
    ids, mask = padded()
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": tokens(6)}
    return transformers.T5ForConditionalGeneration(config), inputs


def make_llama(transformers, dropout=0.0):
    config = transformers.LlamaConfig(
        **small(
            num_key_value_heads=1,
            attention_dropout=dropout,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    ids = tokens()
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def make_vit(transformers, dropout=0.0):
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=12,
        patch_size=4,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=3,
    )
    labels = torch.randint(3, (NUM_ROWS,))
    inputs = {"pixel_values": torch.randn(NUM_ROWS, 3, 12, 12), "labels": labels}
    return transformers.ViTForImageClassification(config), inputs


MODELS = [make_bert, make_gpt2, make_t5, make_llama, make_vit]
LANGUAGE_MODELS = [make_gpt2, make_t5, make_llama]


def to_double(inputs):
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def assert_same_output(got, expected, close=CLOSE):
    assert type(got) is type(expected)
    assert list(got) == list(expected)
    for key, other in expected.items():
        assert_same_leaf(got[key], other, key, close)
        assert_same_leaf(getattr(got, key), other, key, close)


def assert_same_leaf(one, other, key, close):
    assert type(one) is type(other), key
    if isinstance(other, torch.Tensor):
        torch.testing.assert_close(one, other, **close, msg=lambda text: f"{key}: {text}")
    elif isinstance(other, tuple | list):
        assert len(one) == len(other), key
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same_leaf(*pair, f"{key}[{index}]", close)
    elif other is None:
        assert one is None, key
    else:  # a cache of keys and values: compared layer by layer
        assert len(one) == len(other), key
        for mine, theirs in zip(caches(one), caches(other), strict=True):
            torch.testing.assert_close(mine, theirs, **close, msg=lambda text: f"{key}: {text}")


def caches(cache):
    """Every tensor in a cache of keys and values."""
    if hasattr(cache, "self_attention_cache"):
        return caches(cache.self_attention_cache) + caches(cache.cross_attention_cache)
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


@pytest.mark.parametrize("make", MODELS)
def test_five_training_steps_are_the_plain_modules(transformers, make):
    module, inputs = make(transformers)
    module = module.double().train()
    inputs = to_double(inputs)
    plain = copy.deepcopy(module)
    close = CLOSE if module(**inputs).loss.dtype == torch.float64 else CLOSE_IN_FLOAT
    model = DataParallel(module, replicas=NUM_REPLICAS)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    for _ in range(5):
        outputs = []
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            outputs.append(m(**inputs))
            outputs[-1].loss.backward()
        assert_same_output(*outputs, close)
        for (name, one), (_, other) in zip(
            module.named_parameters(), plain.named_parameters(), strict=True
        ):
            assert (one.grad is None) == (other.grad is None), name
            if one.grad is not None:
                torch.testing.assert_close(one.grad, other.grad, **close)
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, **close)


@pytest.mark.parametrize("make", MODELS)
def test_outputs_in_evaluation_are_the_plain_modules_with_all_hidden_states(transformers, make):
    module, inputs = make(transformers)
    module = module.double().eval()
    inputs = to_double(inputs)
    labels = inputs.pop("labels")
    if make is make_t5:
        inputs["decoder_input_ids"] = labels
    model = DataParallel(module, replicas=NUM_REPLICAS)
    more = {"output_hidden_states": True}
    with torch.no_grad():
        for _ in range(2):
            output, expected = model(**inputs, **more), module(**inputs, **more)
            hidden = [value for key, value in expected.items() if "hidden_states" in key]
            assert hidden
            assert all(len(value) == 3 for value in hidden)
            assert_same_output(output, expected)


@pytest.mark.parametrize("make", MODELS)
def test_training_with_dropout_is_reproducible_and_shards_differ(transformers, make):
    module, inputs = make(transformers, dropout=0.3)
    module.train()
    state = copy.deepcopy(module.state_dict())
    runs = []
    for _ in range(2):
        module.load_state_dict(state)
        model = DataParallel(module, replicas=NUM_REPLICAS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(3)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        runs.append((losses, [p.detach().clone() for p in module.parameters()]))
    for one, other in zip(*(losses + parameters for losses, parameters in runs), strict=True):
        assert torch.equal(one, other)
    # The same row in every place: without randomness all rows would be equal.
    same = {k: v[:1].repeat(NUM_ROWS, *[1] * (v.dim() - 1)) for k, v in inputs.items()}
    logits = DataParallel(module, replicas=NUM_REPLICAS)(**same).logits
    assert not torch.allclose(logits[0], logits[3])
    assert not torch.allclose(logits[3], logits[6])


@pytest.mark.parametrize("make", LANGUAGE_MODELS)
def test_generate_in_parallel_is_the_plain_generate(transformers, make):
    module, inputs = make(transformers)
    module = module.double().eval()
    model = DataParallel(module, replicas=NUM_REPLICAS)
    ids = inputs["input_ids"]
    options = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 8,
        "min_new_tokens": 8,  # every shard stops at the same length
        "do_sample": False,
    }
    expected = module.generate(ids, **options)
    assert torch.equal(model.call("generate", ids, **options), expected)
    assert torch.equal(model.generate(ids, **options), expected)  # by attribute: plain


def test_generate_with_scores_keeps_the_output_class(transformers):
    module, inputs = make_gpt2(transformers)
    module = module.double().eval()
    model = DataParallel(module, replicas=NUM_REPLICAS)
    ids = inputs["input_ids"]
    options = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 4,
        "min_new_tokens": 4,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
        "use_cache": False,
    }
    output, expected = model.call("generate", ids, **options), module.generate(ids, **options)
    assert type(output) is type(expected)
    assert torch.equal(output.sequences, expected.sequences)
    for one, other in zip(output.scores, expected.scores, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_a_cache_of_keys_and_values_goes_in_and_out(transformers):
    module, inputs = make_llama(transformers)
    module = module.double().eval()
    model = DataParallel(module, replicas=NUM_REPLICAS)
    ids = inputs["input_ids"]
    found = []
    for m in (model, module):
        with torch.no_grad():
            first = m(input_ids=ids[:, :5], use_cache=True)
            # Its name depends on the library's version.
            name = next(name for name in ("cache", "past_key_values") if name in first)
            found.append(m(input_ids=ids[:, 5:], **{name: first[name]}))
    assert_same_output(*found)


def test_a_library_that_unwraps_by_the_name_module_saves_and_loads(
    transformers, tmp_path, monkeypatch
):
    tqdm = pytest.importorskip("tqdm").tqdm
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # else loading starts a thread that stays
    module, inputs = make_bert(transformers)
    module.eval()
    model = DataParallel(module, replicas=NUM_REPLICAS)
    unwrapped = model.module if hasattr(model, "module") else model
    unwrapped.save_pretrained(tmp_path)
    loaded = DataParallel(type(module).from_pretrained(tmp_path).eval(), replicas=NUM_REPLICAS)
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    assert loaded.config.hidden_size == 16
    assert loaded.dtype == torch.float32


# --------------------------------------------------------------------------------------------------
# Graphs
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def geometric():
    return pytest.importorskip("torch_geometric")


def test_a_batch_of_graphs_is_cut_without_a_word(geometric):
    # Its class is made by another package's metaclass, and names the module "abc" as its own.
    from torch_geometric.data import Batch, Data

    found = [Data(x=torch.ones(n, 2), edge_index=torch.zeros(2, 1).long()) for n in (3, 5, 2)]
    model = samestep.DataParallel(torch.nn.Identity(), replicas=3)
    assert "cut by rows into 1 1 1" in model.explain(Batch.from_data_list(found))


@pytest.fixture
def graphs(geometric):
    """Seven graphs of different sizes in one batch, which the library knows how to cut."""
    from torch_geometric.data import Batch, Data

    def split(batch, sizes):
        parts = iter(batch.to_data_list())
        return [Batch.from_data_list([next(parts) for _ in range(size)]) for size in sizes]

    def merge(batches):
        return Batch.from_data_list([graph for batch in batches for graph in batch.to_data_list()])

    samestep.register_batch_type(
        Batch, split=split, merge=merge, rows=lambda batch: batch.num_graphs
    )
    found = []
    for num_nodes in (3, 5, 2, 4, 1, 6, 3):
        found.append(
            Data(
                x=torch.randn(num_nodes, 4, dtype=torch.float64),
                edge_index=torch.randint(num_nodes, (2, 2 * num_nodes)),
                y=torch.randn(1, 2, dtype=torch.float64),
            )
        )
    return Batch.from_data_list(found)


def make_gnn(geometric):
    from torch_geometric.nn import GATConv, GCNConv, global_mean_pool

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = GCNConv(4, 8)
            self.two = GATConv(8, 8, heads=2)
            self.head = torch.nn.Linear(16, 2)

        def forward(self, data):
            h = self.one(data.x, data.edge_index).relu()
            h = self.two(h, data.edge_index).relu()
            return self.head(global_mean_pool(h, data.batch, data.num_graphs))

    return Net().double()


def test_five_training_steps_of_a_graph_network_are_the_plain_modules(geometric, graphs):
    module = make_gnn(geometric)
    plain = copy.deepcopy(module)
    model = DataParallel(module, replicas=NUM_REPLICAS)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, plain)]
    for _ in range(5):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(m(graphs), graphs.y).backward()
            optimizer.step()
        torch.testing.assert_close(model(graphs), plain(graphs), **CLOSE)
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_a_batch_of_graphs_goes_in_and_out_and_is_explained(geometric, graphs):
    class Doubling(torch.nn.Module):
        def forward(self, data):
            data.x = data.x * 2
            return data

    model = DataParallel(Doubling(), replicas=NUM_REPLICAS)
    assert str(model.explain(graphs)) == "args[0] DataBatch of 7: cut by rows into 3 3 1"
    before = graphs.x.clone()
    output = model(graphs)
    assert type(output) is type(graphs)
    assert torch.equal(output.x, before * 2)
    assert torch.equal(output.edge_index, graphs.edge_index)
    assert torch.equal(output.batch, graphs.batch)
