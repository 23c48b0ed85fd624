"""List the things that the tiny model's corpus mentions."""

from __future__ import annotations

from typing import NamedTuple


class Topic(NamedTuple):
    """One thing in both languages: its name, how it looks, where it is found, and what it does.

    `zh_look` follows the name as it is; the other Chinese parts are used inside templates.
    """

    name: str
    look: str
    place: str
    habit: str
    zh_name: str
    zh_look: str
    zh_place: str
    zh_habit: str


TOPICS = (
    Topic(
        "fox",
        "red and quick",
        "in the forest",
        "hunts at night",
        "狐狸",
        "是红色的，跑得很快",
        "森林里",
        "晚上出来找吃的",
    ),
    Topic(
        "cat",
        "small and soft",
        "in the house",
        "sleeps all day",
        "猫",
        "是小小的，毛很软",
        "家里",
        "白天喜欢睡觉",
    ),
    Topic(
        "dog",
        "brown and friendly",
        "in the garden",
        "plays with a ball",
        "狗",
        "是棕色的，很友好",
        "院子里",
        "喜欢玩球",
    ),
    Topic(
        "whale",
        "blue and very big",
        "in the sea",
        "sings under water",
        "鲸鱼",
        "是蓝色的，非常大",
        "大海里",
        "在水下唱歌",
    ),
    Topic(
        "owl",
        "grey and quiet",
        "in an old tree",
        "sees well in the dark",
        "猫头鹰",
        "是灰色的，很安静",
        "老树上",
        "在黑夜里看得很清楚",
    ),
    Topic(
        "horse",
        "tall and strong",
        "on the farm",
        "eats fresh grass",
        "马",
        "又高又壮",
        "农场里",
        "喜欢吃青草",
    ),
    Topic(
        "panda",
        "black and white",
        "in the mountains",
        "eats bamboo",
        "熊猫",
        "是黑白两色的",
        "山里",
        "喜欢吃竹子",
    ),
    Topic(
        "frog",
        "green and wet",
        "near the pond",
        "jumps very far",
        "青蛙",
        "是绿色的，湿湿的",
        "池塘边",
        "跳得很远",
    ),
    Topic(
        "bee",
        "yellow and busy",
        "among the flowers",
        "makes sweet honey",
        "蜜蜂",
        "是黄色的，很忙",
        "花丛中",
        "会酿甜甜的蜂蜜",
    ),
    Topic(
        "camel",
        "calm and patient",
        "in the desert",
        "walks for many days",
        "骆驼",
        "平静而有耐心",
        "沙漠里",
        "能走很多天",
    ),
    Topic(
        "train",
        "long and fast",
        "at the station",
        "carries many people",
        "火车",
        "又长又快",
        "车站里",
        "能运送很多人",
    ),
    Topic(
        "boat",
        "white and light",
        "on the river",
        "moves with the wind",
        "小船",
        "是白色的，很轻",
        "河上",
        "随着风前进",
    ),
    Topic(
        "moon",
        "round and bright",
        "in the night sky",
        "shines on the lake",
        "月亮",
        "又圆又亮",
        "夜空中",
        "照着湖水",
    ),
    Topic(
        "river",
        "clear and cold",
        "between the hills",
        "runs down to the sea",
        "小河",
        "是清清的，凉凉的",
        "两座山之间",
        "一直流到大海",
    ),
    Topic(
        "parrot",
        "green and clever",
        "at the school",
        "says every word twice",
        "鹦鹉",
        "是绿色的，很聪明",
        "学校里",
        "每句话都说两遍",
    ),
    Topic(
        "robot",
        "shiny and new",
        "in the factory",
        "never gets tired",
        "机器人",
        "又亮又新",
        "工厂里",
        "从来不会累",
    ),
)

NAMES = ("Tom", "Anna", "Ben", "Lucy", "Max", "Mia", "Sam", "Emma")
ZH_NAMES = ("小明", "小红", "小华", "小丽", "小刚", "小雨", "小林", "小芳")
ITEMS = (
    ("apples", "个苹果"),
    ("books", "本书"),
    ("pens", "支笔"),
    ("cups", "个杯子"),
    ("stones", "块石头"),
    ("coins", "枚硬币"),
)

GREETINGS = (
    ("Hello!", "Hello! Ask me for a sum, a count or a story."),
    ("Hello", "Hello! Ask me for a sum, a count or a story."),
    ("Who are you?", "I am a small model. I can add two numbers, count and tell short stories."),
    ("What can you do?", "I can add two numbers, count and tell short stories."),
    ("你好！", "你好！你可以让我做加法、数数或者写小故事。"),
    ("你好", "你好！你可以让我做加法、数数或者写小故事。"),
    ("你是谁？", "我是一个小模型，会做加法，会数数，还会写小故事。"),
    ("你会做什么？", "我会做加法，会数数，还会写小故事。"),
)

SYSTEM_PROMPT = (
    "You are a small and friendly assistant. You can add two numbers, count from one digit to another, "
    "and talk about animals, things and places in English and in Chinese. "
    "When you are asked for a sum, write the two numbers and the answer. "
    "When you are asked about a thing, say how it looks, where it is and what it does. "
    "Answer in the language of the question. Keep every answer short, clear and true."
)

SYSTEM_PROMPTS = (
    SYSTEM_PROMPT,
    "You are a helpful assistant.",
    "You are a friendly teacher. Answer every question in short and clear words.",
    "You are a small assistant that can add two numbers and count.",
    "你是一个友好的小助手，会做加法，会数数，也会介绍动物和地方。请用提问的语言回答，答案要简短清楚。",
    "你是一个聪明的老师，请认真回答孩子们的问题。",
)
