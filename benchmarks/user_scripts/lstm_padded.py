"""An LSTM that classifies sentences, padded to the longest one in each batch."""

import argparse
import random
import time

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

PAD = 0


class Sentences(Dataset):
    """Random sentences. The label is whether words of the lower half are more likely."""

    def __init__(self, count, words, longest):
        rng = random.Random(0)
        self.samples = []
        for _ in range(count):
            share = rng.choice([0.4, 0.6])
            length = rng.randint(5, longest)
            middle = words // 2
            sentence = [
                rng.randrange(1, middle) if rng.random() < share else rng.randrange(middle, words)
                for _ in range(length)
            ]
            self.samples.append((torch.tensor(sentence), int(share > 0.5)))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def collate(samples):
    sentences = [sentence for sentence, _ in samples]
    labels = [label for _, label in samples]
    lengths = torch.tensor([len(s) for s in sentences])
    padded = pad_sequence(sentences, batch_first=True, padding_value=PAD)
    return padded, lengths, torch.tensor(labels)


class Classifier(nn.Module):
    def __init__(self, words, embedding=64, hidden=128):
        super().__init__()
        self.embed = nn.Embedding(words, embedding, padding_idx=PAD)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True, bidirectional=True)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(2 * hidden, 2)

    def forward(self, padded, lengths):
        packed = pack_padded_sequence(
            self.embed(padded), lengths, batch_first=True, enforce_sorted=False
        )
        _, (hidden, _) = self.lstm(packed)
        return self.out(self.drop(torch.cat([hidden[0], hidden[1]], dim=1)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--sentences", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--words", type=int, default=2000)
    parser.add_argument("--longest", type=int, default=40)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = Sentences(args.sentences, args.words, args.longest)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    model = Classifier(args.words).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(args.epochs):
        model.train()
        start, total = time.time(), 0.0
        for padded, lengths, labels in loader:
            optimizer.zero_grad()
            scores = model(padded.to(device), lengths)
            loss = nn.functional.cross_entropy(scores, labels.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch} loss {total / len(loader):.3f} {time.time() - start:.1f} s")
    torch.save(model.state_dict(), "lstm.pt")


if __name__ == "__main__":
    main()
