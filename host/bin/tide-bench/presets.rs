//! Layers of real models, by name: the shapes of the parameters that FSDP2 would put in one group.
//!
//! Parameters stand in the order in which PyTorch registers them. `NAME-tiny` is the same group for
//! a CPU: every dimension of at least 512 is divided by 64, 128 experts become 8, and GPT-2's prime
//! vocabulary becomes another prime; what is uneven stays uneven.

/// The suffix of a scaled-down preset.
const TINY: &str = "-tiny";
/// GPT-2's vocabulary, and the one of its scaled-down preset.
const GPT2_VOCAB: (u64, u64) = (50_257, 787);

/// A parameter's name and shape.
pub type Shape = (String, Vec<u64>);

/// The presets and what each is.
pub const NAMES: [(&str, &str); 13] = [
    ("gpt2-small", "a block of GPT-2 small"),
    ("gpt2-small-root", "its embeddings and final norm"),
    ("llama-3.1-8b", "a layer of Llama 3.1 8B"),
    ("llama-3.1-8b-vocab", "its final norm and output head"),
    ("llama-3.1-70b", "a layer of Llama 3.1 70B"),
    ("llama-3.1-70b-vocab", "its final norm and output head"),
    ("qwen3-30b-a3b", "a layer of Qwen3 30B-A3B, experts fused"),
    ("qwen3-30b-a3b-dense", "the layer without its experts"),
    ("qwen3-30b-a3b-experts", "the fused experts alone"),
    ("qwen3-30b-a3b-unfused", "the layer with every expert's matrices apart: 393 parameters"),
    ("wan2.2-14b", "a block of Wan2.2 T2V A14B"),
    ("wan2.2-14b-root", "its embeddings and head"),
    ("wan2.2-14b-block", "the same as wan2.2-14b"),
];

/// The parameters of preset `name`, or `None` where there is none of that name.
pub fn find(name: &str) -> Option<Vec<Shape>> {
    match name.strip_suffix(TINY) {
        Some(full) => build(full, true),
        None => build(name, false),
    }
}

/// All names, for a message.
pub fn names() -> String {
    let names: Vec<&str> = NAMES.iter().map(|(name, _)| *name).collect();
    format!("{}, each also with {TINY}", names.join(", "))
}

fn build(name: &str, tiny: bool) -> Option<Vec<Shape>> {
    let shapes = match name {
        "gpt2-small" | "gpt2-small-block" => gpt2_block(),
        "gpt2-small-root" => gpt2_root(tiny),
        "llama-3.1-8b" => llama_layer(4096, 1024, 14_336),
        "llama-3.1-70b" => llama_layer(8192, 1024, 28_672),
        "llama-3.1-8b-vocab" => llama_vocab(4096),
        "llama-3.1-70b-vocab" => llama_vocab(8192),
        "qwen3-30b-a3b" | "qwen3-30b-a3b-fused" => [qwen3_dense(experts(tiny)), qwen3_experts(experts(tiny))].concat(),
        "qwen3-30b-a3b-dense" => qwen3_dense(experts(tiny)),
        "qwen3-30b-a3b-experts" => qwen3_experts(experts(tiny)),
        // All experts stay: what this preset is for is their number.
        "qwen3-30b-a3b-unfused" => [qwen3_dense(experts(false)), qwen3_unfused(experts(false))].concat(),
        "wan2.2-14b" | "wan2.2-14b-block" => wan_block(),
        "wan2.2-14b-root" => wan_root(),
        _ => return None,
    };
    Some(if tiny { shapes.into_iter().map(shrink).collect() } else { shapes })
}

fn shrink((name, shape): Shape) -> Shape {
    let shape = shape.into_iter().map(|d| if d >= 512 && d != GPT2_VOCAB.1 { d / 64 } else { d });
    (name, shape.collect())
}

fn experts(tiny: bool) -> u64 {
    if tiny { 8 } else { 128 }
}

fn shape(name: impl Into<String>, dims: &[u64]) -> Shape {
    (name.into(), dims.to_vec())
}

/// A weight and its bias, one bias element for each `out`.
fn affine(name: &str, weight: &[u64], out: u64) -> [Shape; 2] {
    [shape(format!("{name}.weight"), weight), shape(format!("{name}.bias"), &[out])]
}

fn gpt2_block() -> Vec<Shape> {
    let h = 768;
    [
        affine("ln_1", &[h], h),
        affine("attn.c_attn", &[h, 3 * h], 3 * h),
        affine("attn.c_proj", &[h, h], h),
        affine("ln_2", &[h], h),
        affine("mlp.c_fc", &[h, 4 * h], 4 * h),
        affine("mlp.c_proj", &[4 * h, h], h),
    ]
    .concat()
}

fn gpt2_root(tiny: bool) -> Vec<Shape> {
    let vocab = if tiny { GPT2_VOCAB.1 } else { GPT2_VOCAB.0 };
    let mut root = vec![shape("wte.weight", &[vocab, 768]), shape("wpe.weight", &[1024, 768])];
    root.extend(affine("ln_f", &[768], 768));
    root
}

fn llama_layer(h: u64, kv: u64, f: u64) -> Vec<Shape> {
    vec![
        shape("attention.wq.weight", &[h, h]),
        shape("attention.wk.weight", &[kv, h]),
        shape("attention.wv.weight", &[kv, h]),
        shape("attention.wo.weight", &[h, h]),
        shape("feed_forward.w1.weight", &[f, h]),
        shape("feed_forward.w2.weight", &[h, f]),
        shape("feed_forward.w3.weight", &[f, h]),
        shape("attention_norm.weight", &[h]),
        shape("ffn_norm.weight", &[h]),
    ]
}

fn llama_vocab(h: u64) -> Vec<Shape> {
    vec![shape("norm.weight", &[h]), shape("output.weight", &[128_256, h])]
}

fn qwen3_dense(experts: u64) -> Vec<Shape> {
    let (h, head_dim) = (2048, 128);
    vec![
        shape("self_attn.q_proj.weight", &[2 * h, h]),
        shape("self_attn.k_proj.weight", &[512, h]),
        shape("self_attn.v_proj.weight", &[512, h]),
        shape("self_attn.o_proj.weight", &[h, 2 * h]),
        shape("self_attn.q_norm.weight", &[head_dim]),
        shape("self_attn.k_norm.weight", &[head_dim]),
        shape("mlp.gate.weight", &[experts, h]),
        shape("input_layernorm.weight", &[h]),
        shape("post_attention_layernorm.weight", &[h]),
    ]
}

fn qwen3_experts(experts: u64) -> Vec<Shape> {
    vec![
        shape("mlp.experts.gate_proj", &[experts, 768, 2048]),
        shape("mlp.experts.up_proj", &[experts, 768, 2048]),
        shape("mlp.experts.down_proj", &[experts, 2048, 768]),
    ]
}

fn qwen3_unfused(experts: u64) -> Vec<Shape> {
    let matrices = |e| {
        [
            shape(format!("mlp.experts.{e}.gate_proj.weight"), &[768, 2048]),
            shape(format!("mlp.experts.{e}.up_proj.weight"), &[768, 2048]),
            shape(format!("mlp.experts.{e}.down_proj.weight"), &[2048, 768]),
        ]
    };
    (0..experts).flat_map(matrices).collect()
}

fn wan_block() -> Vec<Shape> {
    let (h, f) = (5120, 13_824);
    let attention = |name: &str| {
        let mut parameters: Vec<Shape> = Vec::new();
        for part in ["q", "k", "v", "o"] {
            parameters.extend(affine(&format!("{name}.{part}"), &[h, h], h));
        }
        parameters.push(shape(format!("{name}.norm_q.weight"), &[h]));
        parameters.push(shape(format!("{name}.norm_k.weight"), &[h]));
        parameters
    };
    // A module's own parameters come before those of its children.
    let mut block = vec![shape("modulation", &[1, 6, h])];
    block.extend(attention("self_attn"));
    block.extend(affine("norm3", &[h], h));
    block.extend(attention("cross_attn"));
    block.extend(affine("ffn.0", &[f, h], f));
    block.extend(affine("ffn.2", &[h, f], h));
    block
}

fn wan_root() -> Vec<Shape> {
    let h = 5120;
    let mut root: Vec<Shape> = Vec::new();
    root.extend(affine("patch_embedding", &[h, 16, 1, 2, 2], h));
    root.extend(affine("text_embedding.0", &[h, 4096], h));
    root.extend(affine("text_embedding.2", &[h, h], h));
    root.extend(affine("time_embedding.0", &[h, 256], h));
    root.extend(affine("time_embedding.2", &[h, h], h));
    root.extend(affine("time_projection.1", &[6 * h, h], 6 * h));
    root.push(shape("head.modulation", &[1, 2, h]));
    root.extend(affine("head.head", &[64, h], 64));
    root
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parameters, elements, and elements of a padded shard at `n` ranks.
    fn measure(name: &str, n: u64) -> (usize, u64, u64) {
        let shapes = find(name).unwrap_or_else(|| panic!("{name}"));
        let numel = |s: &[u64]| s.iter().product::<u64>();
        let shard = |s: &[u64]| s[0].div_ceil(n) * numel(&s[1..]);
        (shapes.len(), shapes.iter().map(|(_, s)| numel(s)).sum(), shapes.iter().map(|(_, s)| shard(s)).sum())
    }

    /// Published counts, and bytes of a bf16 shard, of every preset.
    #[test]
    fn the_presets_are_the_models() {
        let known = [
            ("llama-3.1-8b", 9, 218_112_000, 24, 18_207_404),
            ("llama-3.1-70b", 9, 855_654_400, 96, 17_908_056),
            ("qwen3-30b-a3b", 12, 623_120_640, 24, 58_233_200),
            ("qwen3-30b-a3b-dense", 9, 19_140_864, 256, 151_588),
            ("qwen3-30b-a3b-experts", 3, 603_979_776, 96, 18_874_368),
            ("qwen3-30b-a3b-unfused", 393, 623_120_640, 256, 4_870_180),
            ("wan2.2-14b", 27, 351_394_304, 256, 2_806_468),
            ("gpt2-small", 12, 7_087_872, 64, 221_496),
            ("gpt2-small-root", 4, 39_385_344, 8, 9_847_680),
        ];
        for (name, count, elems, ranks, shard_bytes) in known {
            assert_eq!(measure(name, ranks), (count, elems, shard_bytes / 2), "{name}");
        }
        assert_eq!(measure("wan2.2-14b-root", 8).1, 232_719_424);
        assert_eq!(measure("llama-3.1-70b-vocab", 8).1, 1_050_673_152 + 8192);
    }

    #[test]
    fn tiny_presets_fit_a_cpu_and_stay_uneven() {
        for (name, _) in NAMES {
            let tiny = format!("{name}{TINY}");
            let (count, elems, _) = measure(&tiny, 8);
            assert_eq!(count, measure(name, 8).0, "{tiny}");
            assert!(elems < 1 << 20, "{tiny} has {elems} elements");
        }
        let root = find("gpt2-small-root-tiny").unwrap();
        assert_eq!(root[0].1, [787, 12]);
        let modulation = find("wan2.2-14b-tiny").unwrap();
        assert_eq!(modulation[0].1, [1, 6, 80]);
        let fused = find("qwen3-30b-a3b-experts-tiny").unwrap();
        assert_eq!(fused[0].1, [8, 12, 32]);
    }

    #[test]
    fn unknown_names_are_not_found() {
        assert!(find("gpt3").is_none());
        assert!(find("-tiny").is_none());
        assert!(names().contains("wan2.2-14b-root"));
    }
}
